"""Predicts what speculation gains on a model, and by which draft length.

What the prediction needs is measured on this machine, or taken from flags:

- acceptance by draft position and class of texts, from decoding the prompts greedily
  (``--acceptance=0.7``, ``--acceptance=0.8,0.7,0.6``, or ``--acceptance=chat=0.3``,
  once for each class);
- c, the time of one draft step over a one-row pass of the target, from asking the
  drafter again and again on the device (``--cost_ratio``);
- v, the time of a pass of gamma + 1 rows over a one-row pass, from bare passes timed in
  turn, and from batches of them (``--verify_cost=1.5``, or by gamma from 0 on).

The tables have the speed-up that theory predicts, E / (gamma c + v), the one measured
beside plain decoding in the same run, and the engine's efficiency: measured over what
its tokens per pass promise. Decoding is done with --gamma drafts, and with --max_gamma
for the acceptance of all positions. The last pass of a text is cut by its length, which
predictions leave out: short texts measure below them. ``--output`` draws speed-up over
gamma.

With ``--hardware=NAME`` of the table in ``specjax.theory`` nothing is measured: v, c
and the batches at which speculation gains are the roofline's, which is a bound, for
the shape in the target's configuration (a ``config.json`` will do).

Exit status: 2 for wrong arguments, before anything is measured, otherwise 0.
"""

import json
import sys

from absl import app, flags, logging
from rich.console import Console

import specjax
from specjax import bench

FLAGS = flags.FLAGS
flags.DEFINE_string("target", "smollm2-135m-instruct", "Model name, path or hub id.")
flags.DEFINE_string("drafter", "prompt_lookup", "Drafter, as --drafter of generate.")
flags.DEFINE_string("hardware", "measured", "measured, or a device of the table.")
flags.DEFINE_string("prompts", None, "JSONL file, grouped by category.")
flags.DEFINE_integer("per_class", 4, "Prompts of each class.")
flags.DEFINE_integer("gamma", 6, "Draft tokens a pass in use.")
flags.DEFINE_integer("max_gamma", None, "Longest draft; default: twice gamma, or more.")
flags.DEFINE_string("dtype", None, "float32, or bfloat16 (default with --hardware).")
flags.DEFINE_integer("max_new_tokens", 64, "Tokens to decode for each prompt.")
flags.DEFINE_integer("rounds", 3, "Repetitions.")
flags.DEFINE_integer("n_context", 200, "Cached tokens of a sequence in timed passes.")
flags.DEFINE_list("batches", ["1", "2", "4", "8"], "Batches to measure v at.")
flags.DEFINE_multi_string("acceptance", [], "Known acceptance, of a class as chat=0.3.")
flags.DEFINE_float("cost_ratio", None, "Known c.")
flags.DEFINE_string("verify_cost", None, "Known v, one number or by gamma from 0 on.")
flags.DEFINE_string("output", None, "File of the plot: .png, .svg or .pdf.")
flags.DEFINE_string("json", None, "Also write all numbers to this file.")

_PLAIN = (
    "target drafter hardware prompts per_class gamma max_gamma dtype max_new_tokens "
    "rounds n_context cost_ratio output json"
).split()


def _settings() -> bench.PlanSettings:
    verify = FLAGS.verify_cost
    return bench.PlanSettings(
        **{name: getattr(FLAGS, name) for name in _PLAIN},
        batches=bench.parse_batches(FLAGS.batches),
        acceptance=bench.parse_acceptance(FLAGS.acceptance),
        verify_cost=verify and bench.parse_numbers("verify_cost", verify),
    )


def _tell(line: str) -> None:
    print(f"plan: {line}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
    """Plans, prints the tables, and draws."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # JAX tells of backends it lacks
    specjax.enable_compilation_cache()
    try:
        plan = bench.make_plan(_settings(), tell=_tell)
        if FLAGS.output:
            bench.plot_plan(plan, FLAGS.output, title=bench.describe(plan))
        if FLAGS.json:
            with open(FLAGS.json, "w", encoding="utf-8") as file:
                json.dump(plan.as_dict(), file, indent=2)
    except (ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        sys.exit(2)
    Console(width=100).print(bench.render_plan(plan))


if __name__ == "__main__":
    app.run(main)
