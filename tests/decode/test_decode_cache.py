"""The cache over many passes, refills and poison."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import (
    GAMMA,
    MODEL,
    VOCAB,
    assert_same,
    drain,
    logits_of,
    make_engine,
    mixed_requests,
    run,
    texts_of,
)

from specjax.decode import Request, Status
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.testing import planted, tiny_model

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_cache")

LOOKUP = BoundDrafter(prompt_lookup(GAMMA), None)


def _long_requests():
    rng = np.random.default_rng(8)
    return [
        Request(
            prompt_ids=tuple(rng.integers(0, VOCAB, 3 + 9 * i).tolist()),
            max_new_tokens=150,
            temperature=0.5 * (i % 3),
            seed=i,
        )
        for i in range(6)
    ]


def _check_lengths(engine):
    state = jax.device_get(engine._state)
    running = state.status == Status.RUNNING
    np.testing.assert_array_equal(
        state.cache.length[running], state.length[running] - 1
    )
    assert np.all(state.length <= state.limit)
    return int(running.sum())


def test_the_cache_is_one_behind_the_text_over_200_passes():
    """Random accept patterns, every count from none to all and the bonus."""
    requests = _long_requests()
    plain = run(requests)
    draft = planted.partly_right(GAMMA, VOCAB, texts_of(plain))
    engine = make_engine(draft=draft, passes=2)
    for i, request in enumerate(requests):
        engine.submit(dataclasses.replace(request, id=i))
    done = {}
    while engine.busy:
        for event in engine.step():
            if event.completion is not None:
                done[event.id] = event.completion
        _check_lengths(engine)
    got = [done[i] for i in range(len(requests))]
    assert_same(got, plain)
    assert sum(c.stats.passes for c in got) > 200
    accepted = np.sum([c.stats.accepted_at for c in got], axis=0)
    assert np.all(accepted > 0) and np.all(np.diff(accepted) < 0)
    # And what lies in the cache is what one pass over the whole text computes.
    for request, completion in zip(requests, got, strict=True):
        n = len(request.prompt_ids)
        logits = logits_of(MODEL, (*request.prompt_ids, *completion.ids))
        logprobs = jax.nn.log_softmax(logits[n - 1 : -1])
        chosen = logprobs[jnp.arange(len(completion.ids)), jnp.asarray(completion.ids)]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=1e-5)


def test_always_right_accepts_everything_for_the_whole_slot():
    requests = _long_requests()
    plain = run(requests)
    got = run(requests, draft=planted.right(GAMMA, VOCAB, texts_of(plain)))
    assert_same(got, plain)
    for completion in got:
        assert completion.stats.accepted_fraction == 1.0
        assert completion.stats.passes == 150 / (GAMMA + 1)


def test_a_short_request_after_a_long_one_is_as_in_a_new_slot():
    long, short = _long_requests()[5], mixed_requests()[0]
    fresh = run([short], draft=LOOKUP)
    engine = make_engine(draft=LOOKUP)
    drain(engine, [long, long, long])
    assert_same(drain(engine, [short]), fresh)
    draft = planted.remembering(GAMMA, VOCAB, texts_of(fresh))
    engine = make_engine(draft=draft)
    drain(engine, [long, long, long])
    (got,) = drain(engine, [short])
    assert_same([got], fresh)
    assert got.stats.accepted == got.stats.verified > 0


def _poison(state, draft_value=None):
    """Fills everything that must not be read: cache beyond lengths, dead rows."""
    dead = state.status != Status.RUNNING
    alive_length = jnp.where(dead, 0, state.cache.length)

    def spoil(x):  # [B, K, S, M]
        slots = jnp.arange(x.shape[2])[None, :]
        beyond = slots >= alive_length[:, None]
        return jnp.where(beyond[:, None, :, None], jnp.nan, x).astype(x.dtype)

    layers = jax.tree.map(spoil, state.cache.layers)
    index = jnp.arange(state.tokens.shape[1])[None, :]
    beyond = index >= jnp.where(dead, 0, state.length)[:, None]
    return state.replace(
        cache=state.cache.replace(layers=layers),
        tokens=jnp.where(beyond, 7, state.tokens),
        logprobs=jnp.where(beyond, jnp.nan, state.logprobs),
    )


@pytest.mark.parametrize("windows", [(), (8, None)])
def test_poison_beyond_the_lengths_changes_nothing(windows):
    """Before every call the rest of each slot, and dead slots, become NaN."""
    model = tiny_model(windows=windows)
    requests = mixed_requests()
    clean = run(requests, model=model)
    draft = planted.partly_right(GAMMA, VOCAB, texts_of(clean))
    engine = make_engine(model=model, draft=draft)
    for i, request in enumerate(requests):
        engine.submit(dataclasses.replace(request, id=i))
    done = {}
    n_dead = 0
    while engine.busy:
        engine._state = _poison(engine._state)
        for event in engine.step():
            if event.completion is not None:
                done[event.id] = event.completion
        n_dead += 3 - _check_lengths(engine)
    assert_same([done[i] for i in range(len(requests))], clean)
    assert n_dead > 0


def test_a_sliding_window_rolls_back_like_the_rest():
    """Rejected rows must not push keys out of the window."""
    model = tiny_model(windows=(8, None))
    request = dataclasses.replace(mixed_requests()[3], max_new_tokens=100)
    plain = run([request], model=model)
    wrong = planted.wrong(GAMMA, VOCAB, texts_of(plain))
    assert_same(run([request], model=model, draft=wrong), plain)
    (completion,) = plain
    logits = logits_of(model, (*request.prompt_ids, *completion.ids))
    n = len(request.prompt_ids)
    assert completion.ids == tuple(logits[n - 1 : -1].argmax(axis=1).tolist())


def test_rows_longer_than_a_block_of_the_cache():
    """Attention visits two blocks for one row and one for its neighbours."""
    rng = np.random.default_rng(3)
    long = Request(
        prompt_ids=tuple(rng.integers(0, VOCAB, 230).tolist()), max_new_tokens=60
    )
    requests = [*mixed_requests()[:2], long]
    solo = run(requests[:2])
    plain = run(requests, capacity=496)
    assert_same(plain[:2], solo)
    logits = logits_of(MODEL, (*long.prompt_ids, *plain[2].ids))
    assert plain[2].ids == tuple(logits[229:-1].argmax(axis=1).tolist())
    draft = planted.partly_right(GAMMA, VOCAB, texts_of(plain))
    assert_same(run(requests, draft=draft, capacity=496), plain)
