"""Times plain and speculative decoding side by side, peers in the same run.

For each workload class every prompt is decoded by every contender in turn, and this
is repeated. Decoding is greedy, does not stop at end ids, and leaves prefill out.
Drafters are named as for generate.py, with a draft length or ``adaptive``:
``--drafters=prompt_lookup@8,suffix,early_exit:20@3,adaptive(suffix)@8``.

The first table has speeds: "x plain" is the median of pairs measured one after the
other. The second has what speculation did: alpha, drafts kept of those tested (and by
position); f, the share of passes with drafts; tau, tokens a pass; gamma c + v, what
such a pass costs in plain passes by timing its parts alone; the speed-up that these
predict, tau / (gamma c + v); the one measured, all prompts together; and their ratio,
to which the loop, the rule and the commit (and noise) leave less than 1.

``--engine`` times passes instead: what the loop, the rule and the drafter add to the
bare forwards, what a large cache costs, the first token against a bare prefill, and a
draft's pass in smaller types.

Peers are external programs that speak one JSON object a line (``specjax.bench.Peer``):
``--peer=name='command'``, once for each.
"""

import dataclasses
import json
import math
import statistics
import sys

from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

import specjax
from specjax import bench
from specjax.decode import fit_capacity

FLAGS = flags.FLAGS
flags.DEFINE_string("model", "smollm2-135m-instruct", "Model name, path or hub id.")
flags.DEFINE_string("prompts", None, "JSONL file, grouped by category.")
flags.DEFINE_integer("per_class", 4, "Prompts of each class.", lower_bound=1)
flags.DEFINE_list("drafters", ["prompt_lookup"], "Drafters beside plain decoding.")
flags.DEFINE_integer("gamma", 6, "Draft tokens a pass where a drafter's name has none.")
flags.DEFINE_integer("max_new_tokens", 128, "Tokens to generate.")
flags.DEFINE_integer("rounds", 3, "Repetitions.", lower_bound=1)
flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Parameter dtype.")
flags.DEFINE_integer("capacity", None, "Tokens a slot holds; default: fitted.")
flags.DEFINE_multi_string("peer", [], "name=command of a peer program.")
flags.DEFINE_integer("peer_lookup", 6, "Draft tokens of the peers' prompt lookup.")
flags.DEFINE_bool("engine", False, "Time passes instead of texts.")
flags.DEFINE_bool(
    "settings",
    False,
    "Time what rule, warp and request settings add to passes, instead of texts.",
)
flags.DEFINE_string("json", None, "Also write every measurement to this file.")

#: Measurements by class, then by contender.
Series = dict[str, dict[str, list[bench.Measurement]]]


class _Contenders:
    """Everything that decodes: ways of ours and peers, by name."""

    def __init__(self, model: specjax.Model, prompts: list[tuple[int, ...]]) -> None:
        self._peers = [bench.Peer(*text.split("=", 1)) for text in FLAGS.peer]
        entries = [bench.Entry.parse(name, FLAGS.gamma) for name in FLAGS.drafters]
        longest, lengths = max(e.gamma for e in entries), sorted(map(len, prompts))
        need = lengths[-1] + FLAGS.max_new_tokens + longest + 1
        capacity = FLAGS.capacity or fit_capacity(need, model.config.max_context)
        self.contest = bench.Contest(
            model,
            entries,
            capacity=capacity,
            n_context=lengths[len(lengths) // 2] + FLAGS.max_new_tokens // 2,
            rounds=FLAGS.rounds,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )

    def measure(self, ids: tuple[int, ...]) -> dict[str, bench.Measurement]:
        """Times one prompt with every contender, one after the other."""
        request = specjax.Request(
            prompt_ids=ids, max_new_tokens=FLAGS.max_new_tokens, ignore_eos=True
        )
        results = self.contest.measure(request)
        for peer in self._peers:
            for label, lookup in (("plain", 0), ("lookup", FLAGS.peer_lookup)):
                results[f"{peer.name} {label}"] = peer.measure(
                    ids, FLAGS.max_new_tokens, lookup=lookup
                )
        return results

    def close(self) -> None:
        """Ends the peers."""
        for peer in self._peers:
            peer.close()


def _run() -> tuple[Series, bench.Contest]:
    model = specjax.load(FLAGS.model, dtype=FLAGS.dtype)
    groups = bench.read_workloads(FLAGS.prompts) if FLAGS.prompts else bench.WORKLOADS
    encoded = {
        name: [specjax.encode_prompt(model, p) for p in prompts[: FLAGS.per_class]]
        for name, prompts in groups.items()
    }
    contenders = _Contenders(
        model, [ids for group in encoded.values() for ids in group]
    )
    series: Series = {}
    try:
        for name, group in encoded.items():
            for ids in group:
                contenders.measure(ids)  # compiles, warms
                for _ in range(FLAGS.rounds):
                    for contender, result in contenders.measure(ids).items():
                        own = series.setdefault(name, {})
                        own.setdefault(contender, []).append(result)
                print(".", end="", flush=True, file=sys.stderr)
    finally:
        contenders.close()
    print(file=sys.stderr)
    return series, contenders.contest


def _make_table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _speed_table(series: Series) -> Table:
    table = _make_table(
        f"{FLAGS.model}, {FLAGS.dtype}, batch 1, greedy",
        *("class", "contender", "tokens/s", "ms/pass", "tokens/pass", "x plain"),
    )
    for name, contenders in series.items():
        plain = [m.tokens_per_s for m in contenders["plain"]]
        for contender, runs in contenders.items():
            ratio = bench.median_ratio([m.tokens_per_s for m in runs], plain)
            speed = statistics.median(m.tokens_per_s for m in runs)
            per_pass, tau = "-", "-"
            if all(m.passes for m in runs):  # peers do not count passes
                median = statistics.median(m.decode_s / m.passes for m in runs)
                total = sum(m.n_tokens for m in runs) / sum(m.passes for m in runs)
                per_pass, tau = f"{1e3 * median:.2f}", f"{total:.2f}"
            cells = f"{speed:.1f}", per_pass, tau, f"{ratio:.2f}"
            table.add_row(name, contender, *cells)
        table.add_section()
    return table


def _standing_table(standings: dict[str, dict[str, bench.Standing]]) -> Table:
    table = _make_table(
        "What speculation did, what that predicts, what was measured",
        *("class", "drafter", "alpha", "by position", "f", "tau", "gamma c + v"),
        *("predicted", "measured", "ratio"),
    )
    for name, own in standings.items():
        for drafter, it in own.items():
            known = [a for a in it.accepted_at if not math.isnan(a)]
            table.add_row(
                name,
                drafter,
                f"{it.acceptance:.2f}",
                " ".join(f"{a:.2f}".removeprefix("0") for a in known),
                f"{it.drafted:.2f}",
                f"{it.tokens_per_pass:.2f}",
                f"{it.pass_cost:.2f}",
                f"{it.predicted:.2f}",
                f"{it.speedup:.2f}",
                f"{it.efficiency:.2f}",
            )
        table.add_section()
    return table


def _cost_table(contest: bench.Contest) -> Table:
    table = _make_table(
        "Costs in plain passes", "drafter", "c", "v of 0, 1, 2, ... drafts"
    )
    for name, costs in contest.costs.items():
        gamma = bench.Entry.parse(name, FLAGS.gamma).gamma
        v = " ".join(f"{v:.2f}" for v in costs.pass_costs(gamma).verify)
        table.add_row(name, f"{costs.cost_ratio:.3f}", v)
    return table


def _engine_groups(model: specjax.Model, capacity: int) -> list[list[bench.Case]]:
    passes = bench.overhead_cases(
        model, gamma=FLAGS.gamma, capacity=capacity, length=200
    )
    wide = next(i for i, c in enumerate(passes) if c.name.startswith("bare") and i)
    sizes = (fit_capacity(240, 240), fit_capacity(8176, model.config.max_context))
    return [
        passes[:wide],
        passes[wide:],
        bench.capacity_cases(model, gamma=FLAGS.gamma, capacities=sizes, length=200),
        [
            bench.bare_prefill(model, length=200, capacity=capacity),
            bench.first_token_case(model, length=200, capacity=capacity),
        ],
        *(
            bench.precision_cases(model, batch=batch, length=200, capacity=capacity)
            for batch in (1, 4)
        ),
    ]


def _settings_groups(model: specjax.Model, capacity: int) -> list[list[bench.Case]]:
    return [
        bench.settings_cases(
            model, gamma=FLAGS.gamma, capacity=capacity, length=200, batch=batch
        )
        for batch in (1, 8)
    ]


def _engine_table() -> Table:
    """Times passes at 200 tokens, each group against its first case."""
    model = specjax.load(FLAGS.model, dtype=FLAGS.dtype)
    capacity = FLAGS.capacity or fit_capacity(240, model.config.max_context)
    make = _settings_groups if FLAGS.settings else _engine_groups
    groups = make(model, capacity)
    table = _make_table(
        f"{FLAGS.model}, {FLAGS.dtype}, 200 tokens in the cache",
        *("what", "ms", "x first"),
    )
    for group in groups:
        seconds = bench.interleave(group, n=24, rounds=FLAGS.rounds)
        first = seconds[group[0].name]
        for name, values in seconds.items():
            ratio = bench.median_ratio(values, first)
            table.add_row(
                name, f"{1e3 * statistics.median(values):.2f}", f"{ratio:.3f}"
            )
        table.add_section()
    return table


def main(argv: list[str]) -> None:
    """Measures and prints the table."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    specjax.enable_compilation_cache()
    try:
        if FLAGS.engine or FLAGS.settings:
            Console(width=100).print(_engine_table())
            return
        series, contest = _run()
    except (ValueError, OSError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        sys.exit(2)
    standings = {
        name: bench.stand_all(contest, own, FLAGS.rounds)
        for name, own in series.items()
    }
    console = Console(width=140)
    console.print(_cost_table(contest))
    console.print(_speed_table(series))
    console.print(_standing_table(standings))
    if FLAGS.json:
        _write(series, standings)


def _write(series: Series, standings: dict[str, dict[str, bench.Standing]]) -> None:
    """Writes each class's contenders: what they did, and every measurement."""
    with open(FLAGS.json, "w", encoding="utf-8") as file:
        for name, own in series.items():
            for contender, runs in own.items():
                about = standings[name].get(contender)
                record = {
                    "class": name,
                    "contender": contender,
                    "standing": about and dataclasses.asdict(about),
                    "runs": [dataclasses.asdict(m) for m in runs],
                }
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    app.run(main)
