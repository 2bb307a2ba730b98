"""What a contest counts, against passes that are counted by hand."""

import dataclasses
import math

import numpy as np
import pytest

from specjax import bench
from specjax.bench import Costs, Entry, Measurement
from specjax.bench._contest import stand
from specjax.decode import Request, Stats
from specjax.drafters import DrafterSpec
from specjax.models import decoder_target
from specjax.testing import tiny_model


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("suffix", Entry("suffix", 6)),
        ("suffix@3", Entry("suffix", 3)),
        ("early_exit:20@2", Entry("early_exit:20", 2)),
        (" adaptive(layer_skip:1-2)@8", Entry("layer_skip:1-2", 8, adapts=True)),
        ("adaptive(suffix)", Entry("suffix", 6, adapts=True)),
    ],
)
def test_entries_are_named_as_they_are_read(text, entry):
    assert Entry.parse(text, 6) == entry
    assert Entry.parse(entry.name, 1) == entry


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("suffix@many", "write NAME, NAME@GAMMA"),
        ("best@3", "known drafters"),
        ("suffix@0", "gamma=0"),
        ("plain", "always measured"),
        ("adaptive(plain)@4", "always measured"),
    ],
)
def test_wrong_entries_say_what_would_be_right(text, match):
    with pytest.raises(ValueError, match=match):
        Entry.parse(text, 6)


def _runs(decode_s):
    """Two prompts of two rounds each: 2 plain passes, 1 of one draft, 2 of three."""
    stats = Stats(
        passes=5,
        wide_passes=3,
        verified=7,
        accepted=4,
        committed=9,
        verified_at=(3, 2, 2),
        reached_at=(3, 2, 1),
        accepted_at=(2, 1, 1),
    )
    return [Measurement(0.0, s, 9, 5, (), stats) for s in decode_s]


@pytest.mark.parametrize(
    ("spec", "cost"),
    [
        # A search for three costs its 0.3 in every pass; drafts go in a full pass.
        (DrafterSpec("x", 3), (5 * 0.3 + 2 * 1.0 + 3 * 1.5) / 5),
        # A model is asked for what is looked at; a pass of two rows is there as well.
        (
            DrafterSpec("x", 3, draws="coupled", bank=(0, 1)),
            (7 * 0.1 + 2 * 1.0 + 1.2 + 2 * 1.5) / 5,
        ),
        # A tree of six nodes on three levels is verified whole.
        (DrafterSpec("x", 6, depth=3), (5 * 0.6 + 2 * 1.0 + 3 * 1.8) / 5),
        (DrafterSpec("x", 6, depth=3, draws="coupled"), (3 * 0.6 + 2 + 3 * 1.8) / 5),
    ],
)
def test_predictions_are_the_cost_of_the_passes_there_were(spec, cost):
    costs = Costs(0.1, (1.0, 1.2, 1.4, 1.5, 1.6, 1.7, 1.8))
    # Plain decoding took 8 s in the first round and 12 s in the second.
    standing = stand(_runs([1.0, 2.0, 3.0, 4.0]), [8.0, 12.0], costs, spec)
    assert standing.pass_cost == pytest.approx(cost)
    assert standing.tokens_per_pass == pytest.approx(9 / 5)
    assert standing.predicted == pytest.approx(9 / 5 / cost)
    assert standing.speedup == 2.0
    assert standing.efficiency == pytest.approx(2.0 / standing.predicted)
    assert standing.acceptance == pytest.approx(4 / 6)
    assert standing.accepted_at == pytest.approx((2 / 3, 1 / 2, 1.0))
    assert standing.drafted == pytest.approx(3 / 5)


@pytest.mark.slow
def test_a_contest_decodes_the_same_text_in_every_way():
    model = tiny_model()
    entries = [
        Entry.parse(text, 3)
        for text in (
            *("prompt_lookup", "early_exit:1@2", "adaptive(layer_skip:1)@3"),
            "suffix_tree:5",
        )
    ]
    told = []
    contest = bench.Contest(
        model, entries, capacity=128, n_context=20, rounds=1, tell=told.append
    )
    assert told == [f"timing {entry.name}" for entry in entries]
    request = Request(prompt_ids=(1, 2, 3, 1, 2), max_new_tokens=12, ignore_eos=True)
    series = {name: [one] for name, one in contest.measure(request).items()}
    assert len({runs[0].ids for runs in series.values()}) == 1
    standings = bench.stand_all(contest, series, 1)
    assert list(standings) == [entry.name for entry in entries]
    for name, it in standings.items():
        costs = contest.costs[name]
        assert costs.cost_ratio > 0 and costs.verify_cost[0] == 1
        assert it.predicted > 0 and it.speedup > 0
        assert it.drafted == 0 or not math.isnan(it.acceptance)
    # Costs of the passes are measured once for a target; what is left of them after an
    # early exit is its own.
    lookup, leaving, skipping, _ = (contest.costs[entry.name] for entry in entries)
    assert skipping.verify_cost == lookup.verify_cost != leaving.verify_cost


def test_a_pass_from_a_block_on_needs_a_target_that_can_be_cut():
    model = tiny_model()
    case = bench.bare_pass(model, width=2, capacity=64, length=8, start=1)
    assert "from block 1" in case.name and np.isfinite(case.run(2))
    uncut = dataclasses.replace(model, target=decoder_target(model.config, taps=(0,)))
    with pytest.raises(ValueError, match="start=1: tiny-0 cannot be entered"):
        bench.bare_pass(uncut, width=2, capacity=64, length=8, start=1)
