"""Drafts with sublayers left out, scored: gates, positions, laws, and the loop."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, theory
from specjax.bench import SkipCosts
from specjax.bench._skip_score import (
    DraftScorer,
    Text,
    gated_blocks,
    shape_of_both,
)
from specjax.bench._skip_search import SkipSearch
from specjax.models import (
    NO_SKIP,
    DecoderConfig,
    LayerSkip,
    RopeConfig,
    decoder_target,
    init_params,
)
from specjax.testing import tiny_model

#: Everything that a decoder of two blocks can leave out.
ALL = [
    LayerSkip(attention, ff)
    for attention in ((), (0,), (1,))
    for ff in ((), (0,), (1,), (0, 1))
    if attention or ff
]


def _edit(params, path, change):
    """Copies parameters with one leaf changed."""
    key, *rest = path
    value = _edit(params[key], rest, change) if rest else change(params[key])
    return params | {key: value}


@pytest.fixture(scope="module")
def model():
    """A random model that leaves little to agree on by chance."""
    return tiny_model(3)


@pytest.fixture(scope="module")
def planted():
    """A model in which the second block's network and first attention do nothing."""
    model = tiny_model(3)
    params = model.params
    for path in (("1", "ff", "down"), ("0", "attention", "o")):
        params = _edit(params, ("blocks", *path, "kernel"), jnp.zeros_like)
    return dataclasses.replace(model, params=params)


def _write(model):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n) for n in (1, 7, 70, 20)]
    done = specjax.generate(
        model, prompts, drafter=None, max_new_tokens=13, capacity=200
    )
    return [Text("ab"[i % 2], c.prompt_ids, c.ids) for i, c in enumerate(done)]


@pytest.fixture(scope="module")
def texts(model):
    return _write(model)


# Gates.


def _after_a_prompt(config, params):
    """Gives the next tokens, and the cache after a prompt that the whole target saw."""
    whole = decoder_target(config)
    tokens = jax.random.randint(jax.random.key(0), (2, 15), 0, config.vocab_size)
    _, _, cache = whole.forward(params, tokens[:, :9], whole.init_cache(2, 64))
    return tokens[:, 9:], whole.commit(cache, jnp.array([9, 4]))


def _runs(skip, n_layers=2):
    runs = np.ones((n_layers, 2), bool)
    runs[list(skip.attention), 0] = False
    runs[list(skip.ff), 1] = False
    return runs


def _differ(mine, theirs):
    return max(
        float(jnp.max(jnp.abs(a - b)))
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True)
    )


CONFIGS = {
    "plain": tiny_model().config,
    "everything": DecoderConfig(
        vocab_size=64,
        width=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_width=8,
        ff_width=48,
        rope=RopeConfig(kind="linear", factor=2.0),
        tied_head=True,
        qkv_bias=True,
        ff_bias=True,
        qk_norm=True,
        windows=(5, None),
        kernel_layout="out_in",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_gates_leave_out_what_the_target_would(name):
    config = CONFIGS[name]
    params = init_params(config, 1)
    tokens, cache = _after_a_prompt(config, params)
    gated = jax.jit(gated_blocks(config))
    for skip in (NO_SKIP, LayerSkip((1,), (0,)), LayerSkip((0,), (0, 1))):
        form = decoder_target(config, skip=skip)
        expected, _, theirs = jax.jit(form.forward)(params, tokens, cache)
        hidden, mine = gated(params, tokens, cache, _runs(skip))
        logits = decoder_target(config).halves.read(params, hidden)
        assert _differ((logits, mine), (expected, theirs)) < 1e-5


def test_a_wrong_gate_is_not_taken_for_the_right_one(model):
    tokens, cache = _after_a_prompt(model.config, model.params)
    gated = jax.jit(gated_blocks(model.config))
    logits = {}
    for gates in itertools.product((False, True), repeat=4):
        hidden, _ = gated(model.params, tokens, cache, np.reshape(gates, (2, 2)))
        logits[gates] = model.target.halves.read(model.params, hidden)
    for one, other in itertools.combinations(logits, 2):
        assert _differ(logits[one], logits[other]) > 1e-3, (one, other)


# Scores.


def test_nothing_left_out_is_the_target_and_subsets_compile_nothing(model, texts):
    scorer = DraftScorer(model, texts, gamma=3)
    assert scorer.acceptance(NO_SKIP) == 1.0
    assert [len(s) for s in scorer.score(NO_SKIP)] == [13] * 4
    size = scorer._programs.draft._cache_size()
    rates = {skip: scorer.acceptance(skip) for skip in ALL}
    assert scorer._programs.draft._cache_size() == size
    assert len(set(rates.values())) > 4 and max(rates.values()) < 1
    by_class = scorer.by_class(ALL[0])
    assert np.mean([by_class["a"], by_class["b"]]) == pytest.approx(rates[ALL[0]])


def _accepted(model, skip, text, gamma):
    """Walks through a text as decoding does, scoring each pass alone."""
    at, passes, accepted = 0, 0, 0
    while at < len(text.output_ids):
        n = min(gamma, len(text.output_ids) - at)
        before = (*text.prompt_ids, *text.output_ids[:at])
        one = Text("", before, text.output_ids[at : at + n])
        scorer = DraftScorer(model, [one], gamma=gamma, shape=(1, 1, 128))
        (scores,) = scorer.score(skip)
        kept = int(np.cumprod(scores).sum())
        at, passes, accepted = at + kept + 1, passes + 1, accepted + kept
    return passes, accepted


@pytest.mark.slow
def test_what_is_scored_is_what_the_loop_accepts(model, texts):
    # The second block's keys are other ones than the target's.
    gamma, skip = 3, LayerSkip((), (0,))
    drafter = drafters.layer_skip(model, gamma, **skip._asdict())
    total = 0
    for text in texts:
        stats = specjax.generate(
            model,
            [list(text.prompt_ids)],
            drafter=drafter,
            max_new_tokens=len(text.output_ids),
            capacity=200,
        )[0].stats
        passes, accepted = _accepted(model, skip, text, gamma)
        assert stats.passes == passes
        assert abs(stats.accepted - accepted) <= 1  # the last pass is cut short
        total += accepted
    assert total > 0


def test_warm_scores_are_the_overlap_of_the_laws(model, texts):
    temperature, skip = 0.7, LayerSkip((), (0,))
    text = texts[1]
    scorer = DraftScorer(model, [text], gamma=1, temperature=temperature)
    ids = jnp.asarray([[*text.prompt_ids, *text.output_ids]])
    first = len(text.prompt_ids) - 1
    whole = model.target
    forward = jax.jit(decoder_target(model.config, skip=skip).forward)
    # Each token behind the target's own keys of all before it.
    logits, _, cache = whole.forward(model.params, ids, whole.init_cache(1, 100))
    draft = [
        forward(model.params, ids[:, t : t + 1], whole.commit(cache, jnp.array([t])))[
            0
        ][0, 0]
        for t in range(first, ids.shape[1] - 1)
    ]
    expected = theory.acceptance_from_logits(
        logits[0, first:-1], jnp.stack(draft), temperature=temperature
    )
    (scores,) = scorer.score(skip)
    np.testing.assert_allclose(scores, expected.acceptance_rate, atol=1e-5)
    cold = DraftScorer(model, [text], gamma=1).score(skip)[0]
    np.testing.assert_array_equal(cold, expected.top1_agreement)


def test_texts_and_passes_side_by_side_score_as_alone(model, texts):
    gamma, skip = 3, LayerSkip((), (0,))
    short = Text("a", texts[0].prompt_ids, texts[0].output_ids[:5])
    texts = [short, *texts[1:]]
    shape = shape_of_both([short], texts, gamma)
    together = DraftScorer(model, texts, gamma=gamma, shape=shape).score(skip)
    for scores, (name, prompt, output) in zip(together, texts, strict=True):
        assert len(scores) == len(output)
        for at in range(0, len(output), gamma):
            cut = Text(name, (*prompt, *output[:at]), output[at : at + gamma])
            scorer = DraftScorer(model, [cut], gamma=gamma, shape=(1, 1, 128))
            expected = scorer.score(skip)[0]
            np.testing.assert_array_equal(scores[at : at + gamma], expected)
    with pytest.raises(ValueError, match="wrote nothing after the 1 prompts"):
        DraftScorer(model, [short._replace(output_ids=())], gamma=gamma)


# What the search makes of scores.


def test_brute_force_and_search_agree_on_a_model(model, texts):
    scorer = DraftScorer(model, texts, gamma=3)
    costs = SkipCosts((0.08, 0.1), (0.2, 0.25), (1.0, 1.05, 1.1, 1.2))
    best = SkipSearch(scorer.acceptance, costs, max_gamma=3, evaluations=11).run()

    def rank(skip):
        cost = costs.ratio(skip)
        curve = theory.speedup_curve(
            scorer.acceptance(skip), cost, costs.verify_cost, max_gamma=3
        )
        return max(curve[1:]), -cost

    assert best.skip == max(ALL, key=rank)


def test_a_sublayer_that_does_nothing_is_free(planted):
    texts = _write(planted)
    free = LayerSkip((0,), (1,))
    scorer = DraftScorer(planted, texts, gamma=4)
    assert scorer.acceptance(free) == 1.0
    assert scorer.acceptance(LayerSkip((), (0,))) < 1
    warm = DraftScorer(planted, texts, gamma=4, temperature=0.8)
    assert warm.acceptance(free) == pytest.approx(1.0, abs=1e-6)
    costs = SkipCosts((0.2, 0.2), (0.2, 0.2), (1.0, 1.1, 1.2, 1.3, 1.4))
    for each in (scorer, warm):
        search = SkipSearch(each.acceptance, costs, max_gamma=4, evaluations=8)
        assert search.run().skip == free
