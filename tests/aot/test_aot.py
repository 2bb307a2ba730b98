"""The decode programs, compiled for TPUs and GPUs that are not here.

uv run --group aot pytest -m aot -n 1 tests/aot
"""

import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import aot_worker
import pytest

from specjax.testing.aot import TARGETS, Collective, Report, environment

pytestmark = [pytest.mark.aot, pytest.mark.timeout(1800)]

RULES = ("llama/greedy", "llama/rejection", "llama/coupled")
# SmolLM2 where heads cannot be split, and all of Llama's layers, once each.
CASES = {
    "v5e:2x2": (*RULES, "smollm2/greedy", "llama32/greedy"),
    "v6e:2x2": RULES,
    "h200:1": RULES,
    "h200:4": (*RULES, "smollm2/greedy"),
    "gb10:1": RULES,
    "gb10:2x1": (*RULES, "smollm2/greedy"),
}
PAIRS = [(target, case) for target, cases in CASES.items() for case in cases]
BATCH, WIDTH, PREFILL = 4, 7, 64
MIB = 2**20


@functools.cache
def compiled(target, cases):
    """Compiles cases for a target in one process."""
    worker = pathlib.Path(aot_worker.__file__)
    env = {**os.environ, **environment(target)}
    out = subprocess.run(
        [sys.executable, str(worker), target, *cases],
        capture_output=True,
        text=True,
        env=env,
    )
    lines = [json.loads(x) for x in out.stdout.splitlines() if x.startswith("{")]
    if out.returncode or len(lines) != len(cases):
        pytest.fail(f"exit status {out.returncode}\n{out.stderr[-4000:]}")
    return {line["case"]: line for line in lines}


def _reports(target, case):
    return reports_of(compiled(target, CASES[target])[case])


def reports_of(line):
    """Returns the reports of a case, or fails with what the compiler said."""
    if "error" in line:
        pytest.fail(line["error"])
    for fields in line["reports"]:
        for name in ("collectives", "block_collectives"):
            fields[name] = {k: Collective(*v) for k, v in fields[name].items()}
    return [Report(**fields) for fields in line["reports"]]


def copied(report, config):
    """Bytes of kernels that a TPU lays out anew, once a call; no others may be."""
    n, width = report.n_devices, config.width
    heads = [h * config.head_width for h in (config.n_heads, config.n_kv_heads)]
    allowed = {tuple(sorted((width, h // k))) for h in heads for k in (1, n)}
    if config.tied_head:  # rows for the look-up, columns for the head
        allowed.add(tuple(sorted((config.vocab_size // n, width))))
    total = 0
    for key, count in report.copies.items():
        dtype, dims, operation = re.fullmatch(r"(\w+)(\[.*\]) (\S+)", key).groups()
        dims = json.loads(dims)
        assert (dtype, operation) == ("bf16", "copy"), report.copies
        assert tuple(sorted(dims)) in allowed, report.copies
        total += count * 2 * math.prod(-(-d // 128) * 128 for d in dims)  # in tiles
    return total


@pytest.mark.parametrize(("target", "case"), PAIRS)
def test_compiles_and_fits(target, case, record_property):
    reports = _reports(target, case)
    names = ["run", "prefill"] if aot_worker.has_prefill(case) else ["run"]
    assert [r.program for r in reports] == names
    for r in reports:
        record_property("aot", json.dumps([target, case, r._asdict()]))
        assert r.argument_bytes + r.temp_bytes < TARGETS[target].memory_bytes


@pytest.mark.parametrize(("target", "case"), PAIRS)
def test_state_is_updated_in_place(target, case):
    """Every leaf of the donated state takes its own place, sharded as it was."""
    for r in _reports(target, case):
        assert r.n_aliased == r.n_state
        assert r.alias_bytes >= r.state_bytes
        assert not r.moved


@pytest.mark.parametrize(("target", "case"), PAIRS)
def test_nothing_large_is_made_anew(target, case):
    """No float32 copy of a matrix, no copy of keys or values, little in between."""
    model, rule = case.split("/")
    config, _ = aot_worker.MODELS[model]
    # All 32 layers keep 4 MiB each on a v5e that four layers do not, and that do not
    # grow with the cache's capacity; what they are is not known.
    layers = 4 * MIB * config.n_layers if model == "llama32" else 0
    for r in _reports(target, case):
        copies = copied(r, config)
        if TARGETS[target].platform == "gpu":
            assert copies == 0, r.copies
        n = r.n_devices
        # A greedy pass holds logits and what is made of them, a sampled one also
        # scores, masses, keys and noise, each device its part of the vocabulary; a
        # prefill chunk what the feed-forward network makes.
        logits = BATCH * WIDTH * config.vocab_size * 4 // n
        hidden = PREFILL * config.ff_width * 4 // n
        rows = {"run": (4 if rule == "greedy" else 8) * logits, "prefill": 4 * hidden}
        # A float32 copy of one feed-forward matrix of Llama would be 56 MiB or more.
        assert r.temp_bytes - copies < rows[r.program] + 12 * MIB + layers


SPLIT = [(t, c) for t, c in PAIRS if t not in ("h200:1", "gb10:1")]
_WHY = "XLA splits the positions of a wide pass; the library must say not to"
_SPREADS = pytest.mark.xfail(reason=_WHY, strict=True)
IN_BLOCKS = [
    pytest.param(t, c, marks=_SPREADS if c == "llama/rejection" else ())
    for t, c in SPLIT
]


@pytest.mark.parametrize(("target", "case"), IN_BLOCKS)
def test_two_sums_a_layer(target, case):
    """One all-reduce after attention, one after the feed-forward network."""
    model, _ = case.split("/")
    config, rules = aot_worker.MODELS[model]
    sums = 2 if rules["heads"] else 1  # whole heads: attention is computed everywhere
    rows = {"run": BATCH * WIDTH, "prefill": PREFILL}
    for r in _reports(target, case):
        assert set(r.block_collectives) == {"all-reduce"}
        # The loop has a branch for each of two widths; a chunk's last block only
        # leaves its keys and values.
        layers = {"run": 2 * config.n_layers, "prefill": config.n_layers - 1}
        found = r.block_collectives["all-reduce"]
        assert found.n == sums * layers[r.program]
        assert found.largest <= rows[r.program] * config.width * 4


@pytest.mark.parametrize(("target", "case"), SPLIT)
def test_logits_stay_where_they_are(target, case):
    """Outside the blocks: an embedding look-up and reductions over the vocabulary."""
    model, rule = case.split("/")
    config, _ = aot_worker.MODELS[model]
    for r in _reports(target, case):
        if rule == "greedy":
            assert set(r.collectives) == {"all-reduce"}
            n = r.collectives["all-reduce"].n - r.block_collectives["all-reduce"].n
            # The look-up, and the maximum, its index and the sum of two widths.
            assert n == {"run": 2 * 4, "prefill": 1}[r.program]
        # Marks of kept tokens are gathered where a filter breaks ties: a byte each.
        logits = BATCH * WIDTH * config.vocab_size * 4
        assert all(c.largest <= logits / 4 for c in r.collectives.values())


@pytest.mark.parametrize("target", ["h200:1", "gb10:1"])
def test_one_device_tells_nobody(target):
    for case in CASES[target]:
        assert all(r.collectives == {} for r in _reports(target, case))
