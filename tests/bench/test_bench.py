"""The equivalence comparison finds what differs; timing counts what it should."""

import dataclasses
import json
import sys

import pytest

from specjax import bench, drafters, verify
from specjax.decode import Engine, Request
from specjax.testing import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def _requests(temperature, n=3, **kwargs):
    return [
        Request(
            prompt_ids=tuple((7 * i + j * j) % 90 for j in range(12 + i)),
            id=i,
            max_new_tokens=16,
            temperature=temperature,
            seed=i,
            **kwargs,
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_exact_mode_has_no_differences(model, temperature):
    comparison, off = bench.compare(
        model,
        _requests(temperature),
        drafter=drafters.prompt_lookup(4, min_ngram=1),
        rule=verify.coupled,
        exact=True,
        batch_size=2,
    )
    assert comparison.differences == ()
    assert comparison.n == 3 and comparison.n_tokens == sum(len(c.ids) for c in off)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_difference_is_found_and_its_margin_is_that_of_the_choice(model, temperature):
    requests = _requests(temperature, n=1)
    kwargs = dict(
        drafter=drafters.prompt_lookup(4),
        rule=verify.coupled,
        exact=True,
        batch_size=1,
    )
    _, off = bench.compare(model, requests, **kwargs)
    ids = list(off[0].ids)
    ids[5] = (ids[5] + 1) % 256  # planted
    planted = [dataclasses.replace(off[0], ids=tuple(ids))]
    comparison, _ = bench.compare(model, requests, baseline=planted, **kwargs)
    (difference,) = comparison.differences
    assert difference.index == 5
    assert (difference.off, difference.on) == (ids[5], off[0].ids[5])
    # The planted id lost the choice that the true one won.
    assert difference.margin < 0


def test_a_run_that_ended_earlier_is_a_difference_without_margin(model):
    requests = _requests(0.0, n=1)
    kwargs = dict(
        drafter=drafters.plain(), rule=verify.coupled, exact=True, batch_size=1
    )
    _, off = bench.compare(model, requests, **kwargs)
    short = [dataclasses.replace(off[0], ids=off[0].ids[:4])]
    comparison, _ = bench.compare(model, requests, baseline=short, **kwargs)
    (difference,) = comparison.differences
    assert (difference.index, difference.off, difference.margin) == (4, None, None)


def test_measure_counts_and_refuses_a_busy_engine(model):
    engine = Engine(
        model,
        drafter=drafters.plain(),
        rule=verify.coupled,
        batch_size=1,
        capacity=112,
    )
    (request,) = _requests(0.0, n=1)
    result = bench.measure(engine, request)
    assert result.n_tokens == result.passes == 16
    assert result.prefill_s > 0 and result.decode_s > 0
    assert result.tokens_per_s == pytest.approx(16 / result.decode_s)
    engine.submit(request)
    with pytest.raises(ValueError, match="idle"):
        bench.measure(engine, request)


def test_median_ratio_is_of_pairs():
    assert bench.median_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0
    with pytest.raises(ValueError):
        bench.median_ratio([1.0], [1.0, 2.0])


def test_peer_speaks_json_lines(tmp_path):
    program = tmp_path / "peer.py"
    program.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    r = json.loads(line)\n"
        "    ids = r['ids'][:1] * r['max_new_tokens']\n"
        "    print(json.dumps({'prefill_s': 0.5, 'decode_s': 2.0, 'ids': ids}),"
        " flush=True)\n"
    )
    peer = bench.Peer("echo", f"{sys.executable} {program}")
    result = peer.measure([3, 4], 5, lookup=0)
    peer.close()
    assert result.ids == (3,) * 5 and result.tokens_per_s == 2.5


def test_peer_errors_name_the_peer():
    with pytest.raises(ValueError, match="nobody.*cannot run"):
        bench.Peer("nobody", "/no/such/program")
    peer = bench.Peer("mute", f"{sys.executable} -c pass")
    with pytest.raises(RuntimeError, match="mute"):
        peer.measure([1], 1, lookup=0)
    peer.close()


def test_workloads_are_read_by_category(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [
        {"id": "a", "turns": ["one", "two"], "category": "x"},
        {"id": "b", "prompt": "three"},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    assert bench.read_workloads(path) == {"x": ("one",), "all": ("three",)}
    path.write_text("{broken\n")
    with pytest.raises(ValueError, match="line 1"):
        bench.read_workloads(path)


def test_precision_cases_say_what_a_pass_reads():
    model = tiny_model(vocab_size=256, width=256)
    cases = bench.precision_cases(model, batch=2, length=8, capacity=48)
    names = [case.name.split(" in ")[1].split(",")[0] for case in cases]
    assert names == ["float32", "bfloat16", "int8", "int4"]
    megabytes = [int(case.name.split(", ")[1].split()[0]) for case in cases]
    assert megabytes == sorted(megabytes, reverse=True) and megabytes[0] == 4
    seconds = bench.interleave(cases, n=1, rounds=1)
    assert all(value > 0 for values in seconds.values() for value in values)
