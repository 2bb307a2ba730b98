"""Replays of reports: the cache and its rollback, and what comes back."""

import dataclasses
import functools

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import GAMMA, MODEL, VOCAB, assert_same, make_engine, run, texts_of

import specjax
from specjax import cache as kv
from specjax.decode import Origin, Request, Status
from specjax.drafters import BoundDrafter, Drafter, DrafterSpec
from specjax.models import config_from_hf
from specjax.ops.attention import KV_BLOCK, cached_attention
from specjax.testing import planted

# One worker: the tests share compiled programs.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cases_memory")]


@functools.cache
def _plain():
    """Eight rows of 135 tokens, decoded plainly."""
    rng = np.random.default_rng(11)
    requests = [
        Request(
            prompt_ids=tuple(rng.integers(0, VOCAB, 3 + 8 * i).tolist()),
            max_new_tokens=135, temperature=0.5 * (i % 3), seed=i,
        )
        for i in range(8)
    ]  # fmt: skip
    return requests, run(requests)


def _by_rounds(engine, requests, look):
    """Decodes one pass at a time and looks at the state after each."""
    for i, request in enumerate(requests):
        engine.submit(dataclasses.replace(request, id=i))
    done = {}
    while engine.busy:
        for event in engine.step():
            if event.completion is not None:
                done[event.id] = event.completion
        look(engine._state)
    return [done[i] for i in range(len(requests))]


def test_a_draft_that_is_the_target_over_200_rounds():
    """mlxcel #994, #1002: the draft is the target, 200 rounds, any number kept."""
    requests, plain = _plain()
    shapes = set()

    def look(state):
        # One slot behind the text for the target, and the draft's memory with it.
        running = np.asarray(state.status) == Status.RUNNING
        length = np.asarray(state.length)[running]
        np.testing.assert_array_equal(state.cache.length[running], length - 1)
        np.testing.assert_array_equal(state.draft.length[running], length - 1)
        shapes.add(str(jax.tree.map(lambda x: (x.shape, x.dtype), state)))

    whole = planted.remembering(GAMMA, VOCAB, texts_of(plain))
    engine = make_engine(draft=whole, passes=1)
    got = _by_rounds(engine, requests, look)
    assert_same(got, plain)
    assert sum(c.stats.passes for c in got) >= 200
    for done in got:
        assert done.stats.accepted == done.stats.verified
        assert done.stats.passes == 135 / (GAMMA + 1)
    # transformers #30312: no shape ever changed.
    assert len(shapes) == 1

    # One row again, its draft wrong in places so that 0 to gamma drafts are kept.
    (text,) = texts_of(plain[:1])
    known, at = [], len(requests[0].prompt_ids)
    for n_right in (0, 1, 2, 3, 0, 2, 1):
        at += n_right
        known.append([*text[:at], (text[at] + 1) % VOCAB, *text[at + 1 :]])
        at += 1
    bent = planted.remembering(GAMMA, VOCAB, [*known, text])
    engine = make_engine(draft=bent, passes=1)
    kept = []

    def count(state):
        look(state)
        kept.append(int(state.stats.accepted[0]) - sum(kept))

    assert_same(_by_rounds(engine, requests[:1], count), plain[:1])
    assert set(range(GAMMA + 1)) <= set(kept)
    assert kept[-10:-1] == [GAMMA] * 9 and len(shapes) == 1


def test_rejected_rows_have_no_weight_in_attention():
    """EAGLE #336: 64 drafted rows, 5 accepted; the weights themselves."""
    slots, start = KV_BLOCK, 40
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    query = normal(1, 5, 1, slots)
    # Values that are unit vectors: what comes out is the weight of each slot.
    eye = jnp.eye(slots)[None, None]
    cache = kv.init_cache(
        batch=1, capacity=slots - 16, n_layers=1, n_kv_heads=1, head_width=slots,
        dtype=jnp.dtype("float32"), block=slots, slack=16,
    )  # fmt: skip
    cache = kv.commit(cache, jnp.asarray([start]))
    # The pending token and 64 drafts, each of which the query would look at alone.
    drafted = jnp.broadcast_to(8 * query[:, :1], (1, 65, 1, slots))
    layer = kv.write(cache.layers[0], drafted, drafted, cache.length)
    cache = kv.commit(cache, jnp.asarray([1 + 5]))
    layer = kv.write(layer, normal(1, 5, 1, slots), drafted[:, :5], cache.length)
    weights = cached_attention(query, layer.keys, eye, cache.length, scale=0.1)[0, :, 0]
    for row, weight in enumerate(np.asarray(weights)):
        last = start + 6 + row
        assert np.all(weight[last + 1 :] == 0)
        np.testing.assert_allclose(weight[: last + 1].sum(), 1, rtol=1e-5)
    # The accepted ones are looked at; so would the others have been.
    assert weights[0, start : start + 6].sum() > 0.99


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_recurrent_layers_are_refused(changes, match):
    """vLLM #39273, ik_llama.cpp #1639, llama.cpp #20075: any recurrent layer."""
    config = dict(
        architectures=["Qwen3ForCausalLM"], vocab_size=100, hidden_size=64,
        intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, hidden_act="silu",
        max_position_embeddings=256,
    )  # fmt: skip
    assert config_from_hf(config).n_layers == 2
    with pytest.raises(ValueError, match=match):
        config_from_hf(config | changes)


def test_log_probabilities_equal_plain_ones():
    """llama.cpp #27972, vLLM #34497, #17876: logprobs on, against plain."""
    model = chains.model(scale=2.0)
    table = np.asarray(model.params["logits"], np.float64)
    table -= np.log(np.exp(table).sum(-1, keepdims=True))
    requests = [
        Request(
            prompt_ids=(i,), max_new_tokens=20, temperature=t, seed=i, top_logprobs=2
        )
        for i, t in enumerate((0.0, 0.8, 1.0))
    ]
    off = chains.decode(model, requests)
    draft = planted.partly_right(4, chains.VOCAB, texts_of(off))
    on = chains.decode(model, requests, draft)
    assert_same(on, off)
    for done, same in zip(on, off, strict=True):
        assert done.top_logprobs == same.top_logprobs
        text = (*done.prompt_ids, *done.ids)
        own = [table[a, b] for a, b in zip(text, text[1:], strict=False)]
        np.testing.assert_allclose(done.logprobs, own, atol=1e-5)
        assert max(done.logprobs) < 0 and done.stats.accepted > 0
        for a, tops in zip(text, done.top_logprobs, strict=False):
            for token, logprob in tops:
                assert logprob == pytest.approx(table[a, token], abs=1e-5)


def _recorder(inner):
    """Lets a drafter keep every hidden state it is shown, by position."""
    width = MODEL.target.spec.width

    def init(batch, capacity):
        size = capacity + 256
        return jnp.zeros((batch, size, width)), jnp.zeros((batch,), jnp.int32)

    def prefill(params, state, row, tokens, n_real, features):
        seen, length = state
        seen = jax.lax.dynamic_update_slice(seen, features.last, (row, length[row], 0))
        return seen, length.at[row].add(n_real)

    def commit(params, state, context):
        seen, length = state
        n_rows = context.features.last.shape[1]
        at = jnp.arange(n_rows)[None, :]
        at = jnp.where(at < context.n_new[:, None], length[:, None] + at, seen.shape[1])
        rows = jnp.arange(len(length))[:, None]
        seen = seen.at[rows, at].set(context.features.last, mode="drop")
        return seen, length + context.n_new

    return Drafter(
        spec=DrafterSpec("recorder", GAMMA, needs_features=True),
        init=init,
        prefill=prefill,
        reset_row=lambda state, row: (state[0], state[1].at[row].set(0)),
        propose=lambda params, state, context: (
            inner.propose(params, (), context)[0],
            state,
        ),
        commit=commit,
    )


def test_one_hidden_state_a_token_of_its_own_row():
    """SGLang #26163: two rows, hidden states returned."""
    requests, plain = _plain()
    pair = [dataclasses.replace(r, max_new_tokens=30) for r in requests[1:3]]
    known = planted.partly_right(GAMMA, VOCAB, texts_of(plain))
    draft = BoundDrafter(_recorder(known.drafter), known.params)
    engine = make_engine(draft=draft, batch=2)
    got = _by_rounds(engine, pair, lambda state: None)
    seen, length = engine._state.draft
    forward = jax.jit(lambda p, t, c: MODEL.target.forward(p, t, c)[1].last)
    for row, (request, done) in enumerate(zip(pair, got, strict=True)):
        text = np.asarray([*request.prompt_ids, *done.ids])
        assert done.ids == plain[row + 1].ids[:30] and done.stats.accepted > 0
        # All but the last token went through the target, each once.
        n = len(text) - 1
        assert int(length[row]) == n
        padded = np.zeros((1, 64), np.int32)
        padded[0, : n + 1] = text
        wanted = forward(MODEL.params, padded, MODEL.target.init_cache(1, 100))
        np.testing.assert_allclose(seen[row, :n], wanted[0, :n], atol=1e-4)
        other = seen[1 - row, :n]
        assert np.all(np.abs(other - wanted[0, :n]).max(axis=1) > 1e-2)


def test_a_block_of_five_whose_third_is_the_end():
    """vLLM #56101, #17908, SGLang #11572: 5 drafts accepted, the third ends."""
    eos = 77
    run_of_ids = (1, 10, 11, eos, 20, 21, 22)
    model = chains.model(run_of_ids, eos_ids=(eos,))
    (done,) = chains.decode(
        model,
        [Request(prompt_ids=(1,), max_new_tokens=20)],
        chains.limited(5, "right", run_of_ids[:-1]),
        **chains.COUNTED,
    )
    assert (done.ids, done.finish_reason) == ((10, 11, eos), "stop")
    stats = done.stats
    # Five scored and kept by the rule; three are text, and no bonus among them.
    assert (stats.passes, stats.verified, stats.accepted) == (1, 5, 5)
    assert stats.committed == len(done.ids) == 3
    assert done.origins == (Origin.ACCEPTED,) * 3
    assert stats.accepted_fraction == 1 and stats.tokens_per_pass == 3
    for name in ("verified", "accepted", "committed"):
        assert f"{name}: " in specjax.decode.Stats.__doc__


def test_two_calls_share_nothing():
    """transformers #28759, #40739: a call's draft length does not outlive it."""
    model = chains.model((1, 10, 11, 12, 13, 10), scale=1.0)
    call = functools.partial(
        specjax.generate,
        model,
        [[1, 10, 11, 12, 13, 10, 11]],
        max_new_tokens=20,
        exact=True,
    )
    first, other, second = call(gamma=4), call(gamma=2), call(gamma=4)
    assert [len(g.stats.verified_at) for g in (first, other, second)] == [4, 2, 4]
    assert first.stats == second.stats != other.stats
    assert first[0] == second[0] and first[0].ids == other[0].ids
