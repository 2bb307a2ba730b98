"""The search for a self-draft: costs, the search, what is reported and written."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest

import specjax
from specjax import bench, drafters, theory
from specjax.bench import SkipCosts, SkipDraft, SkipRow, SkipSearchSettings
from specjax.bench._skip_costs import cost_by_bytes, skip_costs
from specjax.bench._skip_make import SkipSearchResult
from specjax.bench._skip_score import DraftScorer, Text, shape_of_both
from specjax.bench._skip_search import SkipSearch, is_range, to_skip, to_subset
from specjax.bench._skip_show import skip_record, skip_remarks
from specjax.models import NO_SKIP, LayerSkip
from specjax.testing import tiny_model

#: Everything that a decoder of two blocks can leave out.
ALL = [
    LayerSkip(attention, ff)
    for attention in ((), (0,), (1,))
    for ff in ((), (0,), (1,), (0, 1))
    if attention or ff
]


@pytest.fixture(scope="module")
def model():
    return tiny_model(3)


# Costs.


def test_bytes_are_those_that_a_pass_reads(model):
    n = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    params = model.params
    attention, ff = cost_by_bytes(params, 2)
    read = n(params) - n(params["embedding"])
    block = params["blocks"]["1"]
    assert attention[1] == n([block["attention"], block["attention_norm"]]) / read
    rest = n([params["final_norm"], params["head"]]) / read
    assert sum(attention) + sum(ff) + rest == pytest.approx(1)
    costs = SkipCosts(tuple(attention), tuple(ff), 1.0)
    assert costs.ratio(NO_SKIP) == 1
    assert costs.ratio(LayerSkip((0,), (0, 1))) == pytest.approx(
        1 - attention[0] - sum(ff)
    )
    tied = {k: v for k, v in params.items() if k != "head"}
    assert cost_by_bytes(tied, 2)[1][0] == n([block["ff"], block["ff_norm"]]) / n(tied)


def test_measured_parts_are_medians_of_ratios(model, monkeypatch):
    seconds = {
        "whole": [1.0, 2.0, 9.0],
        "attention": [0.9, 1.9, 8.0],
        "ff": [0.7, 1.4, 1.0],
    }
    monkeypatch.setattr(
        "specjax.bench._skip_costs.interleave",
        lambda cases, n, rounds: {case.name: seconds[case.name] for case in cases},
    )
    given = dict(verify_cost=(1.0, 1.2), max_gamma=1, n_context=9, rounds=3)
    costs = skip_costs(model, "measured", **given)
    # One of two blocks was left out.
    assert costs.attention == pytest.approx((0.1, 0.1))
    assert costs.ff == pytest.approx((0.3, 0.3)) and costs.verify_cost == (1.0, 1.2)
    seconds["attention"] = [1.0, 2.1, 9.1]
    with pytest.raises(ValueError, match="raise rounds, or take costs by bytes"):
        skip_costs(model, "measured", **given)
    with pytest.raises(ValueError, match="n_context=600.*lower"):
        skip_costs(model, "bytes", **(given | {"n_context": 600}))


def test_costs_are_measured_where_they_are_not_given(model):
    given = dict(verify_cost=None, max_gamma=2, n_context=9, rounds=1)
    costs = skip_costs(model, "bytes", **given)
    assert costs.attention == tuple(cost_by_bytes(model.params, 2)[0])
    assert isinstance(costs.verify_cost, tuple) and len(costs.verify_cost) == 3
    assert costs.verify_cost[0] == 1


# The search.

_COSTS = SkipCosts((0.08, 0.1), (0.2, 0.25), (1.0, 1.05, 1.1, 1.2))


def _value(skip, acceptance, costs, gamma):
    cost = costs.ratio(skip)
    curve = theory.speedup_curve(acceptance, cost, costs.verify_cost, max_gamma=gamma)
    return float(max(curve[1:])), -cost


@pytest.mark.parametrize("seed", range(20))
def test_with_budget_for_all_the_best_is_that_of_brute_force(seed):
    rates = dict(zip(ALL, np.random.default_rng(seed).random(len(ALL)), strict=True))
    search = SkipSearch(rates.__getitem__, _COSTS, max_gamma=3, evaluations=99)
    best = search.run()
    assert {d.skip for d in search.drafts.values()} == set(ALL)
    expected = max(ALL, key=lambda skip: _value(skip, rates[skip], _COSTS, 3))
    assert best.skip == expected
    assert best.rank == _value(expected, rates[expected], _COSTS, 3)
    theirs = theory.best_gamma(best.acceptance, best.cost, _COSTS.verify_cost)
    if theirs.gamma:
        assert (best.gamma, best.speedup) == (theirs.gamma, theirs.speedup)


def _layers(n):
    """Costs of n blocks, and an acceptance whose logarithm adds up."""
    rng = np.random.default_rng(n)
    costs = SkipCosts((0.3 / n,) * n, (0.6 / n,) * n, (1.0, 1.02, 1.04, 1.06))
    kept = 1 - 0.2 * rng.random((n, 2)) ** 2

    def accept(skip):
        return float(
            kept[list(skip.attention), 0].prod() * kept[list(skip.ff), 1].prod()
        )

    return costs, accept


def test_a_small_budget_finds_the_best_of_many():
    costs, accept = _layers(5)
    blocks = [s for k in range(6) for s in itertools.combinations(range(5), k)]
    every = [LayerSkip(a, f) for a in blocks for f in blocks if len(a) < 5]
    expected = max(every, key=lambda skip: _value(skip, accept(skip), costs, 3))
    search = SkipSearch(accept, costs, max_gamma=3, evaluations=80)
    assert search.run().skip == expected and expected != NO_SKIP


@pytest.mark.parametrize("evaluations", [24, 25, 31, 60, 150])
def test_the_budget_holds_and_no_subset_is_scored_twice(evaluations):
    costs, accept = _layers(12)
    asked, told = [], []

    def counted(skip):
        skip.check(12)
        asked.append(skip)
        return accept(skip)

    search = SkipSearch(
        counted,
        costs,
        max_gamma=3,
        evaluations=evaluations,
        tell=lambda n, best: told.append((n, best.speedup)),
    )
    search.run()
    assert len(asked) == len(set(asked)) == evaluations == len(search.drafts)
    assert [n for n, _ in told] == list(range(1, evaluations + 1))
    speeds = [speedup for _, speedup in told]
    assert speeds == sorted(speeds)


def test_a_seed_gives_the_same_search_and_another_one_other_restarts():
    costs, accept = _layers(4)

    def visited(seed):
        search = SkipSearch(accept, costs, max_gamma=3, evaluations=150, seed=seed)
        search.run()
        return list(search.drafts)

    assert visited(0) == visited(0)
    assert visited(0) != visited(1)


def test_ties_go_to_what_costs_less():
    # Nothing is ever accepted, and one draft is best: cheaper is faster. Where all is
    # accepted and drafts are free to verify, the cost decides as well.
    for rate in (0.0, 1.0):
        search = SkipSearch(lambda _, r=rate: r, _COSTS, max_gamma=3, evaluations=11)
        assert search.run().skip == LayerSkip((1,), (0, 1))


def test_ranges_of_blocks_are_told_from_others():
    assert is_range(LayerSkip((3,), (3,))) and is_range(LayerSkip((3, 4), (3, 4)))
    for skip in (NO_SKIP, LayerSkip((3,), ()), LayerSkip((3, 5), (3, 5)), ALL[3]):
        assert not is_range(skip)
    skip = LayerSkip((0, 2), (1, 2, 5))
    assert to_skip(to_subset(skip)) == skip


def test_the_best_range_is_found_where_it_stands_out():
    costs, _ = _layers(12)
    # Blocks 4 to 7 do little, the others much.
    little = lambda blocks: sum(4 <= b <= 7 for b in blocks)

    def accept(skip):
        n = len(skip.attention) + len(skip.ff)
        few = little(skip.attention) + little(skip.ff)
        return 0.995**few * 0.6 ** (n - few)

    search = SkipSearch(accept, costs, max_gamma=3, evaluations=80)
    search.run()
    assert search.best_range.skip == LayerSkip((4, 5, 6, 7), (4, 5, 6, 7))
    front = search.front
    for one, other in itertools.pairwise(front):
        assert one.cost > other.cost and one.acceptance > other.acceptance
    assert search.best in front


def test_too_few_evaluations_are_refused():
    costs, accept = _layers(12)
    with pytest.raises(ValueError, match="evaluations=23 .* 12 blocks.* 24 sublayers"):
        SkipSearch(accept, costs, max_gamma=3, evaluations=23)


# All of it.


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Searches on a tiny model, prompts given by class."""
    monkeypatch.setattr("specjax.bench._skip_make.load", lambda name, dtype: model)
    monkeypatch.setattr(
        "specjax.bench._skip_make.load_config", lambda name, dtype: model.config
    )

    def run(classes, **settings):
        path = tmp_path / "prompts.jsonl"
        path.write_text(
            "".join(
                json.dumps({"prompt": prompt, "category": name}) + "\n"
                for name, prompts in classes.items()
                for prompt in prompts
            )
        )
        given = dict(costs="bytes", verify_cost=1.05, n_context=9, evaluations=11)
        told = []
        result = bench.search_layer_skip(
            SkipSearchSettings(
                prompts=str(path), max_new_tokens=9, **(given | settings)
            ),
            tell=told.append,
        )
        return result, told

    return run


CLASSES = {
    "odd": ["one two", "three", "five seven", "nine, ten"],
    "even": ["zero zero", "two four six eight"],
    "alone": ["only this"],
}


@pytest.mark.slow
def test_what_is_reported_of_held_out_texts_is_theirs(model, run, tmp_path):
    result, told = run(CLASSES)
    assert told == [
        "writing the target's answers",
        "timing passes",
        "compiling",
        "searching",
        "scoring on held-out texts",
    ]
    assert result.n_evaluations == 11 and result.n_positions == (36, 27)
    pairs = [(n, i, p) for n, own in CLASSES.items() for i, p in enumerate(own)]
    prompts = [p for *_, p in pairs]
    done = specjax.generate(model, prompts, drafter=None, max_new_tokens=9)
    halves = [], []
    for (n, i, _), c in zip(pairs, done, strict=True):
        halves[i % 2].append(Text(n, c.prompt_ids, c.ids))
    shape = shape_of_both(*halves, 4)
    halves = [DraftScorer(model, half, gamma=4, shape=shape) for half in halves]
    assert result.best in result.rows
    for row in result.rows:
        skip = row.draft.skip
        assert row.draft.acceptance == halves[0].acceptance(skip)
        assert row.held_out == halves[1].acceptance(skip)
        at = dict(gamma=row.draft.gamma, cost_ratio=row.draft.cost, verify_cost=1.05)
        assert row.held_out_speedup == pytest.approx(theory.speedup(row.held_out, **at))
    assert any(row.held_out != row.draft.acceptance for row in result.rows)
    best = result.best.draft.skip
    seen, unseen = (halves[start].by_class(best) for start in (0, 1))
    assert result.classes == {
        "odd": (seen["odd"], unseen["odd"]),
        "even": (seen["even"], unseen["even"]),
        "alone": (seen["alone"], None),
    }
    assert run(CLASSES)[0] == result

    path = tmp_path / "found.json"
    bench.write_skip_search(path, result)
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []
    found = json.loads(path.read_text())
    assert found == json.loads(json.dumps(skip_record(result)))
    made = drafters.layer_skip(model, found["gamma"], **found["skip"])
    assert (
        made.drafter
        is drafters.layer_skip(model, found["gamma"], **best._asdict()).drafter
    )


def test_what_does_not_fit_is_said_before_anything_is_computed(run):
    with pytest.raises(ValueError, match="no class of two prompts"):
        run({"one": ["a"], "two": ["b"]})
    with pytest.raises(ValueError, match="evaluations=3 .* 2 blocks"):
        run(CLASSES, evaluations=3)
    with pytest.raises(ValueError, match="n_context=600.*lower"):
        run(CLASSES, n_context=600)


def _result(acceptance, held_out, cost, v=1.0):
    costs = SkipCosts((0.2, 0.2), (0.2, 0.2), v)
    curve = costs.curve(acceptance, cost, 2)
    gamma = int(np.argmax(curve)) + 1
    skip = LayerSkip((0,), (0,))
    draft = SkipDraft(skip, acceptance, cost, gamma, curve[gamma - 1])
    row = SkipRow(draft, held_out, costs.curve(held_out, cost, 2)[gamma - 1])
    return SkipSearchResult(
        settings=SkipSearchSettings(),
        n_layers=2,
        costs=costs,
        n_evaluations=11,
        n_positions=(36, 27),
        best=row,
        best_range=row,
        rows=(row,),
        classes={"odd": (acceptance, None)},
    )


def test_remarks_say_what_was_found():
    nothing = skip_remarks(_result(0.5, 0.4, 0.6))
    assert nothing[0].startswith("Nothing that was tried beats plain decoding.")
    assert "0.938 of its speed (0.875 on held-out" in nothing[0]
    assert "drafts pay from 0.600 on" in nothing[0]
    assert "no acceptance pays" in skip_remarks(_result(0.9, 0.9, 0.9, 1.5))[0]
    lucky = skip_remarks(_result(0.8, 0.5, 0.6))[0]
    assert "suits the texts of the search alone" in lucky and "0.938" in lucky
    good = skip_remarks(_result(0.9, 0.85, 0.6))
    assert good[0].startswith("Predicted 1.23") and "1.16" in good[0]
    assert "layer_skip:0-0 at gamma" in good[1]
    for found in (_result(0.5, 0.4, 0.6), _result(0.8, 0.5, 0.6)):
        assert not skip_record(found)["pays"]
    assert skip_record(_result(0.9, 0.85, 0.6))["pays"]
    none = dataclasses.replace(_result(0.5, 0.4, 0.6), best_range=None)
    assert skip_remarks(none)[1].startswith("No range of whole blocks was tried")
