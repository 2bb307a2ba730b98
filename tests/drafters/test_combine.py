"""Drafters made of drafters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, verify
from specjax.drafters import BoundDrafter, DraftContext, match_noise
from specjax.sampling import Settings
from specjax.testing import planted, tiny_model
from specjax.testing.loop_checks import check_law, make_model
from specjax.testing.table_target import table_model

GAMMA, VOCAB = 3, 13
DRAFT = tiny_model(5, vocab_size=VOCAB, width=16)
MODEL = BoundDrafter(drafters.model(DRAFT.target, GAMMA), DRAFT.params)
KNOWN = [1, 2, 3, 4, 5, 6, 7, 8]


def context(texts, *, budget=None, temperature=0.0):
    history = np.zeros((len(texts), 32), np.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
    n = len(texts)
    return DraftContext(
        history=jnp.asarray(history),
        length=jnp.asarray([len(t) for t in texts], jnp.int32),
        settings=Settings.full(n, temperature=temperature),
        features=None,
        n_new=jnp.ones((n,), jnp.int32),
        budget=None if budget is None else jnp.asarray(budget, jnp.int32),
    )


@functools.cache
def compiled(drafter):
    return jax.jit(drafter.propose)


def propose(draft, at):
    state = draft.drafter.init(at.history.shape[0], 48)
    if at.budget is None:
        at = at._replace(budget=jnp.full_like(at.length, draft.drafter.spec.gamma))
    return compiled(draft.drafter)(draft.params, state, at)


def test_the_second_drafts_where_the_first_does_not():
    first = planted.right(GAMMA, VOCAB, [KNOWN])
    draft = drafters.fallback(first, planted.constant(2, VOCAB, [9, 10]))
    assert draft.drafter.spec.gamma == GAMMA
    got, _ = propose(draft, context([KNOWN[:3], [5, 5], KNOWN[:7]]))
    assert got.n_valid.tolist() == [3, 2, 1]
    assert got.tokens.tolist() == [[4, 5, 6], [9, 10, 0], [8, 0, 0]]
    assert got.logprobs is None
    longer = drafters.fallback(first, planted.constant(2, VOCAB, [9, 10]), least=2)
    got, _ = propose(longer, context([KNOWN[:3], [5, 5], KNOWN[:7]]))
    assert got.n_valid.tolist() == [3, 2, 2]


def test_a_model_rests_where_retrieval_finds_something():
    draft = drafters.fallback(planted.right(GAMMA, VOCAB, [KNOWN]), MODEL)
    got, (_, rested) = propose(draft, context([KNOWN[:3], KNOWN[:2]]))
    assert got.n_valid.tolist() == [3, 3]
    assert rested.read.tolist() == [0, 0]
    _, (_, worked) = propose(draft, context([KNOWN[:3], [7, 7]]))
    assert worked.read.tolist() == [5, 4]  # a batch drafts together
    _, (_, spared) = propose(draft, context([KNOWN[:3], [7, 7]], budget=[3, 1]))
    assert spared.read.tolist() == [3, 2]


def test_point_masses_beside_drawn_drafts_say_so():
    draft = drafters.fallback(planted.right(GAMMA, VOCAB, [KNOWN]), MODEL)
    assert draft.drafter.spec.draws == "sample"
    got, _ = propose(draft, context([KNOWN[:3], [7, 7]], temperature=1.0))
    alone, _ = propose(MODEL, context([KNOWN[:3], [7, 7]], temperature=1.0))
    assert got.logprobs is not None
    laws = np.exp(np.asarray(got.logprobs))
    np.testing.assert_array_equal(laws[0], np.eye(VOCAB)[[4, 5, 6]])
    np.testing.assert_array_equal(got.logprobs[1], alone.logprobs[1])
    coupled = match_noise(draft.drafter, "gumbel")
    assert coupled.spec.draws == "coupled"
    assert coupled is match_noise(draft.drafter, "gumbel")


@pytest.mark.parametrize(
    "rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)]
)
def test_sequences_have_the_targets_law(rule):
    rng = np.random.default_rng(8)
    small = table_model(1.5 * rng.normal(size=(5, 5, 5)))
    second = BoundDrafter(drafters.model(small.target, GAMMA), small.params)
    lookup = drafters.prompt_lookup(2, min_ngram=1, max_ngram=2)
    draft = drafters.fallback(lookup, second)
    fault = check_law(make_model(), verify.by_name(rule), draft, calls=80)
    assert fault is None, fault


def test_a_truncated_drafter_is_the_beginning_of_it():
    short = drafters.truncate(MODEL, 2)
    assert short.drafter.spec.gamma == 2 and short.params is MODEL.params
    at = context([KNOWN[:3], [7, 7]], temperature=1.0)
    got, state = propose(short, at)
    whole, _ = propose(MODEL, at)
    np.testing.assert_array_equal(got.tokens, whole.tokens[:, :2])
    np.testing.assert_array_equal(got.logprobs, whole.logprobs[:, :2])
    assert got.n_valid.tolist() == [2, 2]
    assert state.read.tolist() == [4, 3]  # it did no more than that


def test_wrong_arguments_say_what_would_be_right():
    with pytest.raises(ValueError, match="gamma=4 is more than the 3"):
        drafters.truncate(MODEL, 4)
    with pytest.raises(ValueError, match="least=4 is more than the 3"):
        drafters.fallback(MODEL, drafters.prompt_lookup(4), least=4)
    leaving = drafters.early_exit(tiny_model().target, 1)
    with pytest.raises(ValueError, match="begins the target's pass"):
        drafters.fallback(MODEL, leaving)


def test_equal_calls_give_the_identical_drafter():
    again = lambda: drafters.fallback(drafters.prompt_lookup(4), MODEL).drafter
    assert again() is again()
    assert drafters.truncate(MODEL, 2).drafter is drafters.truncate(MODEL, 2).drafter
