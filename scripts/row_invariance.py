"""Shows how the width of a pass changes a model's logits on this backend.

The model writes some texts; then every position is scored in passes of one row, as
plain decoding does, and in passes of several, as verification does. The table has how
often the best token differs (the argmax flip rate), and the histogram how close the
two best tokens were where it did. In exact mode nothing may differ in any bit.

Exit status: 1 when a bit differs in exact mode, 2 for wrong arguments, otherwise 0.
"""

import sys

from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

import specjax
from specjax import bench

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "smollm2-135m-instruct", "Model name, path or hub id.")
flags.DEFINE_string("prompts", None, "JSONL file of prompts; default: a built-in set.")
flags.DEFINE_integer("limit", 6, "Use only the first prompts.", lower_bound=1)
flags.DEFINE_list("widths", ["2", "7"], "Widths to compare with one row.")
flags.DEFINE_integer("max_new_tokens", 48, "Tokens that the model writes.")
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Parameter dtype.")


def _texts(model: specjax.Model) -> tuple[list[list[int]], list[int]]:
    """Returns prompts with the model's greedy answers, and where the answers start."""
    groups = bench.read_workloads(FLAGS.prompts) if FLAGS.prompts else bench.WORKLOADS
    prompts = [p for group in zip(*groups.values(), strict=False) for p in group]
    done = specjax.generate(
        model,
        prompts[: FLAGS.limit],
        drafter=None,
        max_new_tokens=FLAGS.max_new_tokens,
    )
    texts = [[*c.prompt_ids, *c.ids] for c in done]
    return texts, [len(c.prompt_ids) - 1 for c in done]


def _widths() -> list[int]:
    try:
        return [int(text) for text in FLAGS.widths]
    except ValueError:
        raise ValueError(f"--widths={FLAGS.widths} must be whole numbers.") from None


def _compare() -> list[bench.Flips]:
    widths = _widths()
    model = specjax.load(FLAGS.model, dtype=FLAGS.dtype)
    texts, start = _texts(model)
    return [
        bench.count_flips(model, texts, width=width, exact=exact, start=start)
        for exact in (False, True)
        for width in widths
    ]


def _print(results: list[bench.Flips], console: Console) -> None:
    table = Table(title=f"one row against several, {FLAGS.model}, {FLAGS.dtype}")
    for column in ("mode", "rows", "positions", "differ", "largest", "flips", "rate"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            "exact" if r.exact else "free",
            str(r.width),
            str(r.n_positions),
            str(r.n_different),
            f"{r.largest_difference:.2g}",
            str(int(r.flipped.sum())),
            f"{r.flip_rate:.4f}",
        )
    console.print(table)
    free = [r for r in results if not r.exact]
    table = Table(title="margin of the best token over the second, and flips")
    table.add_column("margin", justify="right")
    table.add_column("positions", justify="right")
    for r in free:
        table.add_column(f"flips, {r.width} rows", justify="right")
    for bins in zip(*(r.histogram() for r in free), strict=True):
        low, high, n, _ = bins[0]
        table.add_row(f"{low:g} to {high:g}", str(n), *(str(b[3]) for b in bins))
    console.print(table)


def main(argv: list[str]) -> None:
    """Compares, prints the tables, and sets the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of backends it lacks
    specjax.enable_compilation_cache()
    try:
        results = _compare()
    except (ValueError, OSError) as error:
        print(f"row_invariance: {error}", file=sys.stderr)
        sys.exit(2)
    _print(results, Console())
    sys.exit(1 if any(r.n_different for r in results if r.exact) else 0)


if __name__ == "__main__":
    app.run(main)
