"""A plan is theory's arithmetic on what was measured; nothing here asserts a time."""

import dataclasses
import json
import math

import numpy as np
import pytest

from specjax import bench, drafters, theory
from specjax.bench import Costs, PlanSettings, Profile, Run
from specjax.decode import Stats
from specjax.drafters import PassCosts
from specjax.testing import tiny_model
from specjax.testing.table_target import table_model

A = (0.8, 0.6, 0.5, 0.25)
V = (1.0, 1.1, 1.2, 1.4, 1.9)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def test_always_drafting_gives_theory_to_the_bit():
    costs = Costs(0.05, V)
    plan = bench.plan_class(Profile("x", A), costs, gamma=3, max_gamma=4)
    advice = theory.advise(A, 3, 0.05, V, max_gamma=4)
    assert plan.predicted == advice.speedup
    assert plan.best == advice.best and plan.advice == advice.lines
    assert plan.curve == tuple(theory.speedup_curve(A, 0.05, V, max_gamma=4))
    rate = bench.plan_class(Profile("x", 0.7), Costs(0.1, 1.0), gamma=4, max_gamma=9)
    assert rate.best == theory.best_gamma(0.7, 0.1, max_gamma=9)


def _walk(n_plain, n_spans, span, gamma, c, v):
    """Counts a text of plain tokens and of spans that a drafter knows by heart."""
    wide = n_spans * math.ceil(span / (gamma + 1))
    cost = (n_plain + wide) * gamma * c + n_plain + wide * v
    return (n_plain + n_spans * span) / cost, n_plain + wide


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_a_drafter_silent_on_part_of_the_text_is_counted_right(gamma):
    # Spans that every one of these draft lengths divides evenly.
    n_plain, n_spans, span, c = 100, 10, 6, 0.02
    v = (1.0, 1.2, 1.3, 1.4, 1.6, 2.0)
    text = n_plain + n_spans * span
    profile = Profile("x", (1.0,) * 5, drafted=n_spans * span / text)
    plan = bench.plan_class(profile, Costs(c, v), gamma=gamma, max_gamma=5)
    expected, _ = _walk(n_plain, n_spans, span, gamma, c, v[gamma])
    assert plan.predicted == pytest.approx(expected, rel=1e-12)
    assert plan.curve[gamma] == pytest.approx(expected, rel=1e-12)
    assert max(plan.curve) == pytest.approx(plan.best.speedup)


def test_efficiency_is_measured_over_what_its_own_tokens_promise():
    profile = Profile("x", A, 1.0, (Run(2, 1.5, 2.0, 0.5),))
    plan = bench.plan_class(profile, Costs(0.05, V), gamma=2, max_gamma=4)
    # Half of the passes cost 1.2 and half 1; each pays for two drafts.
    assert plan.efficiency[0] == pytest.approx(1.5 / (2.0 / (0.1 + 1.1)))


def test_advice_of_a_drafter_that_is_silent_at_times():
    v = (1.0, 1.5, 1.6, 1.7, 1.8)
    good = bench.plan_class(
        Profile("x", (0.9,) * 4, 0.3), Costs(0.0, v), gamma=1, max_gamma=4
    )
    assert good.advice[0].startswith("Raise gamma from 1 to 4")
    always = theory.best_gamma((0.9,) * 4, 0.0, v).speedup
    assert f"every pass {always:.2f}" in good.advice[1] and "30%" in good.advice[1]
    bad = bench.plan_class(
        Profile("x", (0.2,) * 4, 0.3), Costs(0.0, v), gamma=2, max_gamma=4
    )
    # With c = 0 what is paid for in silence is nothing: a_1 > v - 1, as always.
    assert bad.advice == (
        "Switch speculation off: no gamma gains; where it drafts, one draft pays only "
        "above an acceptance rate of 0.50.",
    )
    never = bench.plan_class(
        Profile("x", (), 0.0), Costs(0.01, v), gamma=2, max_gamma=4
    )
    assert never.advice[0].startswith("Change the drafter")
    assert never.predicted == pytest.approx(1 / 1.02)


def test_break_even_is_where_one_draft_gains_nothing():
    v, c, drafted = 1.3, 0.04, 0.4
    costs = Costs(c, v)
    profile = Profile("x", 0.05, drafted)
    line = bench.plan_class(profile, costs, gamma=1, max_gamma=3).advice[0]
    even = float(line.rsplit(" ", 1)[1].rstrip("."))
    for a, sign in ((even - 0.01, -1), (even + 0.01, 1)):
        at = bench.plan_class(Profile("x", a, drafted), costs, gamma=1, max_gamma=1)
        assert np.sign(at.predicted - 1) == sign


def test_batches_become_wide_where_one_row_drafts():
    costs = Costs(0.0, V, by_batch={1: 1.4, 2: 1.5, 8: 2.4})
    profile = Profile("x", A, 0.5)
    plan = bench.plan_class(profile, costs, gamma=3, max_gamma=4)
    assert plan.by_batch[1] == pytest.approx(plan.predicted)
    tokens = 1 + 0.8 + 0.8 * 0.6 + 0.8 * 0.6 * 0.5
    share = 0.5 / (0.5 * tokens + 0.5)  # of the passes of one row
    mean = tokens / (0.5 * tokens + 0.5)
    wide = 1 - (1 - share) ** 2
    assert plan.by_batch[2] == pytest.approx(mean / (1 - wide + wide * 1.5))
    assert plan.by_batch[8] < 1
    line = plan.advice[-1]
    assert f"1 ({plan.by_batch[1]:.2f}), 2 ({plan.by_batch[2]:.2f})." in line
    assert line.endswith("Switch speculation off above 2.")


def test_a_device_of_the_table_gives_the_rooflines_numbers():
    settings = PlanSettings(
        hardware="H200_SXM", acceptance={"x": 0.3}, cost_ratio=0.1, gamma=4
    )
    plan = bench.make_plan(settings)
    target = bench.model_shape(_smollm2())
    parts = {
        field.name: 0.1 * getattr(target, field.name)
        for field in dataclasses.fields(target)
        if isinstance(getattr(target, field.name), float | int)
    }
    whole = dict(n_reductions=0, n_experts=0, n_experts_per_token=0)
    deployment = theory.Deployment(
        target=target,
        hardware=theory.get_hardware("h200-sxm"),
        draft=theory.ModelShape(**(parts | whole)),
    )
    (one,) = plan.classes
    # A draft model of a tenth in everything takes a tenth of the time everywhere.
    assert plan.costs.cost_ratio == pytest.approx(0.1)
    v = theory.predict_verify_cost(deployment, np.arange(1, 34), n_context=200)
    np.testing.assert_allclose(plan.costs.verify_cost, v, rtol=1e-12)
    for batch in (1, 8, 256):
        expected = theory.predict_speedup(
            deployment, 0.3, 4, batch=batch, n_context=200
        )
        assert one.by_batch[batch] == pytest.approx(expected)
    advice = theory.advise_deployment(deployment, 0.3, 4, n_context=200, max_gamma=32)
    assert one.advice == advice.lines


def _smollm2():
    from specjax.weights import load_config

    return load_config("smollm2-135m-instruct", dtype="bfloat16")


def test_shape_counts_what_the_decoder_holds():
    shape = bench.model_shape(_smollm2())
    assert shape.n_params == pytest.approx(134.5e6, rel=1e-3)
    assert shape.weight_bytes == 2 * shape.n_params


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A plan with nothing given, on a model that goes through its ids in order."""
    n = 95
    table = np.full((n, n, n), -30.0, np.float32)
    table[:, np.arange(n), (np.arange(n) + 1) % n] = 0.0
    model = table_model(table)
    prompts = tmp_path_factory.mktemp("plan") / "prompts.jsonl"
    everything = model.need_tokenizer().decode(list(range(n)))
    texts = {"known": everything + " !", "new": "ab"}
    prompts.write_text(
        "".join(
            json.dumps({"id": name, "prompt": text, "category": name}) + "\n"
            for name, text in texts.items()
        )
    )
    settings = PlanSettings(
        prompts=str(prompts),
        gamma=2,
        max_gamma=2,
        max_new_tokens=24,
        rounds=1,
        n_context=16,
        batches=(1, 2),
    )
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specjax.bench._plan_make.load", lambda name, dtype: model)
        plan = bench.make_plan(settings, tell=told.append)
    return plan, told


def test_what_is_not_given_is_measured(measured):
    plan, told = measured
    assert told[1:] == ["decoding known", "decoding new"]
    costs = plan.costs
    assert costs.cost_ratio > 0 and costs.one_row_s > 0
    assert len(costs.verify_cost) == 3 and costs.verify_cost[0] == 1
    assert set(costs.by_batch) == {1, 2}
    assert costs.by_batch[1] == pytest.approx(costs.verify_cost[2])
    assert [one.profile.name for one in plan.classes] == ["known", "new"]
    for one in plan.classes:
        assert len(one.efficiency) == 1 and len(one.curve) == 3 and one.advice


def test_acceptance_is_what_the_loop_counted(measured):
    known, new = (one.profile for one in measured[0].classes)
    # 24 tokens in 8 passes of two drafts, all kept.
    assert known.acceptance == (1.0, 1.0) and known.drafted == 1
    assert known.runs[0].tokens_per_pass == 3 and known.runs[0].drafted == 1
    assert known.runs[0].accepted_at == known.runs[0].reached_at == (8, 8)
    # Nothing in the text comes twice.
    assert new.acceptance == () and new.drafted == 0
    assert new.runs[0].tokens_per_pass == 1 and new.runs[0].drafted == 0


def test_speedups_are_medians_over_rounds_of_all_prompts_together(model, monkeypatch):
    # Seconds of each prompt with gamma 0, 2 and 4, round after round, warm-up first.
    seconds = [
        *((9.0, 9.0, 9.0), (9.0, 9.0, 9.0)),
        *((4.0, 2.0, 1.0), (6.0, 2.0, 3.0)),
        *((4.0, 2.0, 1.0), (4.0, 2.0, 1.0)),
        *((8.0, 1.0, 1.0), (8.0, 1.0, 1.0)),
    ]
    series = iter(value for turn in seconds for value in turn)

    def fake(engine, request):
        gamma = engine.plan.drafter.spec.gamma
        # Ten passes, half of them wide; of those one keeps two drafts, one keeps one.
        fill = lambda *counts: (counts + (0,) * gamma)[:gamma]
        stats = Stats(
            passes=10,
            wide_passes=5,
            verified=5 * gamma,
            accepted=3,
            committed=13,
            verified_at=(5,) * gamma,
            reached_at=fill(5, 2, 1),
            accepted_at=fill(2, 1, 0),
        )
        return bench.Measurement(0.0, next(series), 13, 10, (), stats)

    monkeypatch.setattr("specjax.bench._plan_measure.measure", fake)
    zoo = [drafters.prompt_lookup(gamma) for gamma in (2, 4)]
    decoding = bench.Decoding(model, zoo, {"x": [(1,), (2,)]}, max_new_tokens=13)
    profile = decoding.profile("x", rounds=3)
    assert [run.gamma for run in profile.runs] == [2, 4]
    assert [run.speedup for run in profile.runs] == [2.5, 4.0]
    assert profile.runs[1].tokens_per_pass == 1.3 and profile.runs[1].drafted == 0.5
    assert profile.acceptance == (0.4, 0.5, 0.0)
    # Five passes of ten gave one token each, the rest of 13 came with drafts.
    assert profile.drafted == pytest.approx(8 / 13)


def test_what_does_not_fit_is_said_before_measuring(model):
    with pytest.raises(ValueError, match="n_context=500.*lower"):
        bench.measure_costs(
            model, drafters.prompt_lookup(2), max_gamma=3, n_context=500
        )
    with pytest.raises(ValueError, match="capacity"):
        bench.Decoding(model, [], {"x": [(1,) * 600]}, max_new_tokens=24)


def test_costs_are_those_of_a_batch(model, monkeypatch):
    asked = []

    def draft_case(model, drafter, **options):
        asked.append((drafter.params, options["batch"]))
        return bench.Case("draft", lambda n: 0.0)

    def interleave(cases, *, n, rounds):
        rows = {1: 2.0, 2: 3.0, 3: 5.0}
        name = lambda b, w: f"bare forward, {b} x {w} rows"
        times = {name(4, w): [x] * rounds for w, x in rows.items()}
        times |= {name(1, w): [1.0 * w] * rounds for w in rows} | {"draft": [0.8] * 3}
        return {case.name: times[case.name] for case in cases}

    monkeypatch.setattr("specjax.bench._plan_measure.draft_case", draft_case)
    monkeypatch.setattr("specjax.bench._plan_measure.interleave", interleave)
    draft = drafters.BoundDrafter(drafters.suffix(2), "a datastore")
    at = dict(max_gamma=2, n_context=50)
    costs = bench.measure_costs(model, draft, batch=4, batches=(4,), **at)
    assert costs == Costs(0.2, (1.0, 1.5, 2.5), {4: 2.5}, 2.0)
    assert asked == [("a datastore", 4)]
    costs = bench.measure_costs(model, draft.drafter, batches=(1, 4), **at)
    assert costs == Costs(0.4, (1.0, 2.0, 3.0), {1: 3.0, 4: 2.5}, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layer_skip:1", "prompt_lookup"])
def test_drafters_are_timed_on_their_own(model, name):
    draft = drafters.for_target(name, 2, model)
    case = bench.draft_case(model, draft, capacity=112, length=20, batch=2)
    assert case.run(1) > 0


def test_costs_are_what_an_adaptive_drafter_takes():
    assert Costs(0.1, (1.0, 1.2, 1.4)).pass_costs(1) == PassCosts(0.1, (1.0, 1.2))
    assert Costs(0.0, 1.5).pass_costs(2) == PassCosts(0.0, (1.0, 1.5, 1.5))
    with pytest.raises(ValueError, match="reach to 2 drafts and gamma=3"):
        Costs(0.1, (1.0, 1.2, 1.4)).pass_costs(3)
