"""Searches for the sublayers that a self-draft should leave out (``layer_skip``).

The target answers the prompts greedily. A subset of its attention and feed-forward
sublayers is scored by what a draft without them is accepted at on those answers, behind
the target's own keys and values as in decoding: the share of tokens that are the
target's (``--temperature=0``), or the mean overlap of both laws. What a draft costs is
linear in the sublayers: of one-row passes timed in turn, or of parameter bytes
(``--costs=bytes``). v, the cost of a pass of gamma + 1 rows, is timed or given
(``--verify_cost=1.5``, or by number of drafts from 0 on). The search maximises the
speed-up that theory predicts at the best draft length.

Each sublayer is left out alone, then ranges of blocks, then greedily more and more,
then others in their place, until ``--evaluations`` subsets are scored. Every other
prompt of a class is held out: the table has what the search saw, and what it did not.
``--output`` writes all of it as JSON, of which

    found = json.load(open("skip.json"))
    drafters.layer_skip(model, found["gamma"], **found["skip"])

makes the drafter. Exit status: 2 for wrong arguments, before anything is computed,
otherwise 0, also where nothing was found that beats plain decoding.
"""

import sys
import time

from absl import app, flags, logging
from rich import progress
from rich.console import Console

import specjax
from specjax import bench

FLAGS = flags.FLAGS
flags.DEFINE_string("target", "smollm2-135m-instruct", "Model name, path or hub id.")
flags.DEFINE_string("prompts", None, "JSONL file, grouped by category.")
flags.DEFINE_integer("per_class", 4, "Prompts of each class, half of them held out.")
flags.DEFINE_integer("max_new_tokens", 48, "Tokens of each answer, at most.")
flags.DEFINE_float("temperature", 0.0, "That drafts are scored at.")
flags.DEFINE_integer("max_gamma", 4, "Longest draft, the length scored.")
flags.DEFINE_integer("evaluations", 160, "Subsets to score.")
flags.DEFINE_integer("seed", 0, "Of the restarts.")
flags.DEFINE_string("costs", "measured", "Of sublayers: measured, or bytes.")
flags.DEFINE_string("verify_cost", None, "Known v, one number or from 0 drafts on.")
flags.DEFINE_integer("rounds", 5, "Repetitions of what is timed.")
flags.DEFINE_integer("n_context", 200, "Cached tokens in timed passes.")
flags.DEFINE_string("dtype", "float32", "float32, or bfloat16.")
flags.DEFINE_string("output", None, "JSON file of what was found.")

_PLAIN = (
    "target prompts per_class max_new_tokens temperature max_gamma evaluations seed "
    "costs rounds n_context dtype output"
).split()

# Between two lines of progress.
_LINE_SECONDS = 10.0


def _settings() -> bench.SkipSearchSettings:
    verify = FLAGS.verify_cost
    return bench.SkipSearchSettings(
        **{name: getattr(FLAGS, name) for name in _PLAIN},
        verify_cost=verify and bench.parse_numbers("verify_cost", verify),
    )


class _Progress:
    """Shows how far the search is: a bar in a terminal, now and then a line elsewhere.

    What comes before the first evaluation, and after the last, is told line by line.
    """

    def __init__(self) -> None:
        self._shown = time.monotonic()
        self._bar = self._task = None

    def __call__(self, n: int, best: bench.SkipDraft) -> None:
        """Takes the number of evaluations and the best draft."""
        text = (
            f"{n}/{FLAGS.evaluations} | best: {best.size} left out, accepted at "
            f"{best.acceptance:.3f}, c {best.cost:.3f}, predicted {best.speedup:.3f}"
        )
        if self._bar is None and sys.stderr.isatty():
            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
                console=Console(file=sys.stderr),
                redirect_stdout=False,
            )
            self._task = self._bar.add_task(text, total=FLAGS.evaluations)
            self._bar.start()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=n, description=text)
        elif time.monotonic() - self._shown >= _LINE_SECONDS:
            self._shown = time.monotonic()
            self.tell(text)

    def tell(self, line: str) -> None:
        """Prints a line."""
        self.close()
        print(f"search_layer_skip: {line}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leaves the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def main(argv: list[str]) -> None:
    """Searches, prints the tables, and writes the file."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of backends it lacks
    specjax.enable_compilation_cache()
    shown = _Progress()
    try:
        result = bench.search_layer_skip(_settings(), tell=shown.tell, progress=shown)
        if FLAGS.output:
            bench.write_skip_search(FLAGS.output, result)
    except (ValueError, OSError) as error:
        print(f"search_layer_skip: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        shown.close()
    Console(width=100).print(bench.render_skip_search(result))


if __name__ == "__main__":
    app.run(main)
