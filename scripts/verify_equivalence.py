"""Shows that speculation does not change the text.

Every prompt is generated with speculation off and on, at each temperature and for
each drafter, and the ids are compared. In exact mode (the default) they must be
identical; ``--noexact`` lets the width of a pass follow the draft, as fast decoding
does, and reports how often a floating-point tie fell the other way. ``--settings``
adds request settings to every prompt: penalties, bias (and bans), a least length,
forced tokens, a constraint, by name or ``all`` at once.

Exit status: 1 when ids differ in exact mode, 2 for wrong arguments, otherwise 0.
"""

import sys
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

import specjax
from specjax import bench, drafters
from specjax.decode import resolve
from specjax.text import Record, TokenMask, read_records

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "smollm2-135m-instruct", "Model name, path or hub id.")
flags.DEFINE_string("prompts", None, "JSONL file of prompts; default: a built-in set.")
flags.DEFINE_integer("limit", None, "Use only the first prompts.", lower_bound=1)
flags.DEFINE_list("temperatures", ["0", "0.7", "1.0"], "Temperatures.")
flags.DEFINE_list("drafters", ["prompt_lookup"], "Drafters.")
flags.DEFINE_integer("gamma", 6, "Draft tokens a pass.")
flags.DEFINE_enum("rule", "coupled", ["coupled", "greedy"], "Verify rule.")
flags.DEFINE_integer("max_new_tokens", 64, "Tokens to generate for each prompt.")
flags.DEFINE_float("top_p", 1.0, "Nucleus mass; 1 is off.")
flags.DEFINE_integer("top_k", 0, "Most probable tokens kept; 0 is off.")
flags.DEFINE_list(
    "settings", [], "Request settings: penalties, bias, least, forced, constraint, all."
)
flags.DEFINE_integer("seed", 0, "Seed.")
flags.DEFINE_integer("batch_size", 8, "Slots.")
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Parameter dtype.")
flags.DEFINE_bool("exact", True, "Compare in exact mode.")


# A list of short lines: long enough to bind, small enough for a table.
_PATTERN = r"(- [A-Za-z ,']{3,40}\n){3,}"


def _controls(model: specjax.Model) -> specjax.Controls:
    """Makes the controls that --settings names."""
    tokenizer = model.need_tokenizer()
    id_of = lambda text: tokenizer.encode(text, add_special_tokens=False)[0]
    known: dict[str, Callable[[], dict[str, Any]]] = {
        "penalties": lambda: dict(
            repetition_penalty=1.15, presence_penalty=0.3, frequency_penalty=0.2
        ),
        "bias": lambda: dict(
            logit_bias={id_of(" the"): -2.0, id_of(" a"): 1.5, id_of("\n"): 1.0},
            banned_ids=(id_of(" and"), id_of(",")),
        ),
        "least": lambda: dict(min_new_tokens=min(24, FLAGS.max_new_tokens)),
        "forced": lambda: dict(
            forced_ids={0: id_of("-"), FLAGS.max_new_tokens // 2: id_of("\n")}
        ),
        "constraint": lambda: dict(
            token_mask=TokenMask.from_regex(
                _PATTERN,
                tokenizer,
                model.eos_ids,
                vocab_size=model.config.vocab_size,
            )
        ),
    }
    # A forced token inside a constraint would leave no token.
    everything = [name for name in known if name != "forced"]
    controls: dict[str, Any] = {}
    for name in FLAGS.settings:
        if name not in (*known, "all"):
            raise ValueError(
                f"--settings: {name!r} is not known; known: {', '.join(known)}, all."
            )
        for part in everything if name == "all" else [name]:
            controls |= known[part]()
    return specjax.Controls(**controls)


def _requests(
    model: specjax.Model, temperature: float, controls: specjax.Controls
) -> list[specjax.Request]:
    if FLAGS.prompts is None:
        prompts = [
            (f"{name}/{i}", text)
            for name, texts in bench.WORKLOADS.items()
            for i, text in enumerate(texts)
        ]
    else:
        records = list(read_records(FLAGS.prompts))
        for record in records:
            if not isinstance(record, Record):
                raise ValueError(f"{FLAGS.prompts}, line {record.line}: {record.error}")
        prompts = [(r.id, r.turns[0]) for r in records if isinstance(r, Record)]
    return [
        specjax.Request(
            prompt_ids=specjax.encode_prompt(model, text),
            id=name,
            max_new_tokens=FLAGS.max_new_tokens,
            temperature=temperature,
            top_p=FLAGS.top_p,
            top_k=FLAGS.top_k,
            seed=FLAGS.seed,
            controls=controls,
        )
        for name, text in prompts[: FLAGS.limit]
    ]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--temperatures: {text!r} is no number; give some, as in 0,0.7,1.0"
        ) from None


def _compare_all(console: Console) -> list[bench.Comparison]:
    temperatures = [_number(t) for t in FLAGS.temperatures]
    for name in FLAGS.drafters:
        drafters.check_name(name, FLAGS.gamma)
    model = specjax.load(FLAGS.model, dtype=FLAGS.dtype)
    pairs = [resolve(model, name, FLAGS.gamma, FLAGS.rule) for name in FLAGS.drafters]
    controls = _controls(model)
    results = []
    for temperature in temperatures:
        requests = _requests(model, temperature, controls)
        for drafter, rule in pairs:
            result, _ = bench.compare(
                model,
                requests,
                drafter=drafter,
                rule=rule,
                exact=FLAGS.exact,
                batch_size=min(FLAGS.batch_size, len(requests)),
            )
            results.append(result)
            same = result.n - len(result.differences)
            console.print(f"T={temperature} {result.drafter}: {same}/{result.n} same")
    return results


def main(argv: list[str]) -> None:
    """Compares, prints the tables, and sets the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of backends it lacks
    specjax.enable_compilation_cache()
    console = Console()
    try:
        results = _compare_all(console)
    except (ValueError, OSError) as error:
        print(f"verify_equivalence: {error}", file=sys.stderr)
        sys.exit(2)
    mode = "exact" if FLAGS.exact else "free widths"
    table = Table(title=f"speculation on against off, {FLAGS.dtype}, {mode}")
    for column in ("drafter", "T", "prompts", "identical", "tokens", "tokens/pass"):
        table.add_column(column, justify="right")
    for r in results:
        same = r.n - len(r.differences)
        cells = (r.drafter, r.temperature, r.n, same, r.n_tokens)
        table.add_row(*map(str, cells), f"{r.tokens_per_pass:.2f}")
    console.print(table)
    for r in results:
        for d in r.differences:
            margin = "-" if d.margin is None else f"{d.margin:.3g}"
            console.print(
                f"{r.drafter} T={r.temperature} {d.id}: first difference at output "
                f"token {d.index}: {d.off} off, {d.on} on, score margin {margin}"
            )
    n = sum(len(r.differences) for r in results)
    console.print(f"{sum(r.n for r in results)} comparisons, {n} differences")
    sys.exit(1 if n and FLAGS.exact else 0)


if __name__ == "__main__":
    app.run(main)
