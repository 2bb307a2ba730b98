"""Speculation on and off give the same text.

With ``exact=True`` ids and log-probabilities agree in every bit; without, they may
differ where floating point cannot tell two tokens apart.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import (
    GAMMA,
    MODEL,
    PLAIN,
    VOCAB,
    assert_same,
    margin,
    mixed_requests,
    run,
    texts_of,
)

from specjax.decode import Origin
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.ops.attention import cached_attention
from specjax.ops.platform import row_invariant
from specjax.ops.vocab import log_normalizer
from specjax.testing import planted, tiny_model

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_identity")

BFLOAT16 = tiny_model(dtype="bfloat16")
MODELS = {"float32": MODEL, "bfloat16": BFLOAT16}
LOOKUP = BoundDrafter(prompt_lookup(GAMMA), None)

# Two scores this close may swap when another program computes them: logits are of
# size 1 to 4 and the tiny model's float32 sums are right to about 1e-6.
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def truth():
    """Plain decoding, exact, at width 5 in a batch of 3."""
    known = {}

    def get(dtype, rule):
        if (dtype, rule) not in known:
            requests = mixed_requests(sampled=rule == "coupled")
            plain = run(requests, model=MODELS[dtype], rule=rule)
            known[dtype, rule] = requests, plain
        return known[dtype, rule]

    return get


def _planted(completions, gamma=GAMMA):
    texts = texts_of(completions)
    return {
        "right": planted.right(gamma, VOCAB, texts),
        "wrong": planted.wrong(gamma, VOCAB, texts),
        "partly_right": planted.partly_right(gamma, VOCAB, texts),
        "outside_vocabulary": planted.outside_vocabulary(gamma, VOCAB, texts),
        "silent": planted.silent(gamma, VOCAB, texts),
        "hashed": planted.hashed(gamma, VOCAB, texts),
    }


@pytest.mark.parametrize(
    ("dtype", "rule"),
    [
        ("float32", "coupled"),
        ("bfloat16", "coupled"),
        pytest.param("float32", "greedy", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name",
    ["right", "wrong", "partly_right", "outside_vocabulary", "silent", "hashed"],
)
def test_exact_identity_for_planted_drafters(truth, dtype, rule, name):
    requests, plain = truth(dtype, rule)
    draft = _planted(plain)[name]
    got = run(requests, model=MODELS[dtype], draft=draft, rule=rule)
    assert_same(got, plain)
    stats = [c.stats for c in got]
    if name == "right":
        assert all(s.accepted == s.verified > 0 for s in stats)
        assert all(s.passes < s.committed / 3 for s in stats)
    elif name == "wrong":
        assert all(s.accepted == 0 < s.verified for s in stats)
    elif name == "silent":
        assert all(s.verified == 0 for s in stats)
    else:
        assert any(0 < s.accepted for s in stats)


def test_exact_identity_for_prompt_lookup(truth):
    requests, plain = truth("float32", "coupled")
    got = run(requests, draft=LOOKUP)
    assert_same(got, plain)
    assert sum(c.stats.accepted for c in got) > 20


@pytest.mark.parametrize(
    ("dtype", "gamma"),
    [("float32", 2), pytest.param("bfloat16", 7, marks=pytest.mark.slow)],
)
def test_exact_identity_at_other_gammas_and_batches(truth, dtype, gamma):
    """The width of the pass is another one, and the batch: still the same bits."""
    requests, plain = truth(dtype, "coupled")
    draft = BoundDrafter(prompt_lookup(gamma), None)
    got = run(requests, model=MODELS[dtype], draft=draft, width=gamma + 1, batch=1)
    assert_same(got, plain)
    assert sum(c.stats.accepted for c in got) > 20


def test_exact_identity_of_plain_decoding_at_another_width_and_batch(truth):
    requests, plain = truth("float32", "coupled")
    assert_same(run(requests, width=1, batch=1), plain)


def test_exact_identity_when_products_are_cut_into_pieces(truth):
    """Four slots of nine rows are more than one piece of a product."""
    requests, plain = truth("float32", "coupled")
    draft = _planted(plain)["partly_right"]
    for a, b in zip(run(requests, draft=draft, width=9, batch=4), plain, strict=True):
        assert a.ids == b.ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-6)


@pytest.mark.parametrize("vocab", [256, 1000])
def test_a_log_probability_does_not_depend_on_the_number_of_rows(vocab):
    """In bits, as exact decoding needs where the batch and the width change."""
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(size=(40, vocab)), jnp.float32)
    normalizer = jax.jit(log_normalizer)
    every = np.asarray(normalizer(scores))
    for n in (1, 3, 5, 15, 30):
        np.testing.assert_array_equal(normalizer(scores[:n]), every[:n])


@pytest.mark.parametrize("rows", [9, 17, 33, 64])
def test_attention_of_a_row_does_not_depend_on_the_number_of_rows(rows):
    """In bits, as exact decoding needs for a large gamma; the tiny model's heads."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    keys, values, q = normal(1, 1, 256, 16), normal(1, 1, 256, 16), normal(1, 64, 2, 16)
    length = jnp.full((1,), 100, jnp.int32)
    attend = jax.jit(lambda q: cached_attention(q, keys, values, length, scale=0.25))
    with row_invariant():
        few, many = attend(q[:, :5]), attend(q[:, :rows])
    np.testing.assert_array_equal(many[:, :5], few)


def test_exact_identity_of_a_drafter_with_a_memory(truth):
    """Its drafts are right only where prefill and commit told it the whole text."""
    requests, plain = truth("float32", "coupled")
    draft = planted.remembering(GAMMA, VOCAB, texts_of(plain))
    got = run(requests, draft=draft)
    assert_same(got, plain)
    for request, completion in zip(requests, got, strict=True):
        stats = completion.stats
        assert stats.accepted == stats.verified
        assert stats.passes == -(-request.max_new_tokens // (GAMMA + 1))


def test_exact_identity_on_sliding_windows():
    model = tiny_model(windows=(8, None))
    requests = mixed_requests()
    plain = run(requests, model=model)
    full = run(requests)
    assert any(a.ids != b.ids for a, b in zip(plain, full, strict=True))
    draft = _planted(plain)["partly_right"]
    assert_same(run(requests, model=model, draft=draft), plain)


@pytest.mark.parametrize("name", ["prompt_lookup", "partly_right", "hashed"])
def test_without_exact_only_near_ties_may_differ(truth, name):
    requests, plain = truth("float32", "coupled")
    draft = LOOKUP if name == "prompt_lookup" else _planted(plain)[name]
    got = run(requests, draft=draft, exact=False)
    for request, a, b in zip(requests, got, plain, strict=True):
        pairs = zip(a.ids, b.ids, strict=True)
        differs = [i for i, (x, y) in enumerate(pairs) if x != y]
        if differs:
            assert margin(MODEL, request, b.ids, differs[0]) < NEAR_TIE
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert sum(c.stats.accepted for c in got) > 20
    if name == "prompt_lookup":  # it drafts nothing in some passes
        assert any(0 < c.stats.wide_passes < c.stats.passes for c in got)


def test_greedy_and_coupled_agree_at_temperature_0(truth):
    requests, greedy = truth("float32", "greedy")
    assert_same(run(requests, rule="coupled"), greedy)


def test_one_word_48_times():
    """A report from elsewhere: 48 times one word, 32 new tokens, lookup on and off."""
    ids = tuple(MODEL.tokenizer.encode("hello " * 48))[:190]
    request = dataclasses.replace(
        mixed_requests()[0], prompt_ids=ids, max_new_tokens=32, temperature=0.0
    )
    off, on = run([request], draft=PLAIN), run([request], draft=LOOKUP)
    assert_same(on, off)
    assert Origin.ACCEPTED in on[0].origins
    assert set(off[0].origins) == {Origin.PLAIN}
