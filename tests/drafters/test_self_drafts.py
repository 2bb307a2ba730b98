"""A target as its own drafter: early exit, skipped layers, a smaller type."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, verify
from specjax.decode import Engine, Request
from specjax.drafters import BoundDrafter
from specjax.models import KVBudget, LayerSkip, decoder_target
from specjax.ops.platform import row_invariant
from specjax.testing import planted, tiny_model

GAMMA, VOCAB, CAPACITY, EXIT = 3, 13, 112, 1
TARGET = tiny_model(6, vocab_size=VOCAB)
TEXT = np.random.default_rng(3).integers(0, VOCAB, 100)


def requests(max_drafts=(None,) * 4):
    prompts = [TEXT[:5], TEXT[7:37], TEXT[3:6], TEXT[50:51]]
    return [
        Request(
            prompt_ids=tuple(int(t) for t in prompt),
            id=i,
            max_new_tokens=(40, 9, 23, 1)[i],
            temperature=(0.0, 0.8, 1.3, 0.7)[i],
            top_p=0.9,
            seed=i,
            max_drafts=max_drafts[i],
        )
        for i, prompt in enumerate(prompts)
    ]


def complete(draft, rule="coupled", *, model=TARGET, exact=True, asked=None):
    asked = requests() if asked is None else asked
    engine = Engine(
        model,
        drafter=draft,
        rule=verify.by_name(rule),
        batch_size=2,
        capacity=CAPACITY,
        exact=exact,
        width=GAMMA + 1 if exact else None,
    )
    done = {e.id: e.completion for e in engine.run(asked) if e.completion}
    return [done[i] for i in range(len(asked))]


def first_blocks(model):
    """The same blocks as a model of its own, with a cache of its own."""
    config = dataclasses.replace(model.config, n_layers=EXIT)
    params = {**model.params, "blocks": {"0": model.params["blocks"]["0"]}}
    drafter = drafters.model(decoder_target(config), GAMMA, n_ids=VOCAB)
    return BoundDrafter(drafter, params)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_early_exit_is_its_first_blocks_as_a_model(rule):
    """Drafts, draws, what is kept and what is written: all but the second cache."""
    one = complete(drafters.early_exit(TARGET.target, EXIT, GAMMA), rule)
    two = complete(first_blocks(TARGET), rule)
    for a, b in zip(one, two, strict=True):
        assert (a.ids, a.stats, a.logprobs) == (b.ids, b.stats, b.logprobs)
    assert sum(c.stats.accepted for c in one) > 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_early_exit_changes_no_text(dtype):
    model = tiny_model(6, vocab_size=VOCAB, dtype=dtype)
    plain = complete(drafters.plain(), model=model)
    done = complete(drafters.early_exit(model.target, EXIT, GAMMA), model=model)
    for a, b in zip(plain, done, strict=True):
        assert (a.ids, a.logprobs) == (b.ids, b.logprobs)


@pytest.mark.parametrize("kind", ["early_exit", "layer_skip"])
def test_rows_that_draft_less_than_others_keep_their_text(kind):
    """What a row writes while others still draft stands in the cache of its text."""
    draft = {
        "early_exit": drafters.early_exit(TARGET.target, EXIT, GAMMA),
        "layer_skip": drafters.layer_skip(TARGET, GAMMA, ff=(1,)),
    }[kind]
    plain = complete(drafters.plain())
    for most in ((0, 3, 2, 1), (1, 0, 3, 2), (3, 1, 0, 0)):
        done = complete(draft, asked=requests(most))
        for a, b in zip(plain, done, strict=True):
            assert (a.ids, a.logprobs) == (b.ids, b.logprobs)


def test_two_halves_are_the_whole_in_every_bit():
    target, ids = TARGET.target, jnp.asarray(TEXT[None, :5], jnp.int32)
    halves = target.halves
    assert halves is not None and halves.n_blocks == 2

    @jax.jit
    def whole(params, cache):
        with row_invariant():
            return target.forward(params, ids, cache)

    @jax.jit
    def cut(params, cache):
        with row_invariant():
            hidden, cache = halves.begin(params, ids, cache, stop=EXIT)
            return halves.finish(params, hidden, cache, start=EXIT)

    args = TARGET.params, target.init_cache(1, CAPACITY)
    for a, b in zip(
        jax.tree.leaves(whole(*args)), jax.tree.leaves(cut(*args)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_skipped_sublayers_add_nothing_to_the_residual_stream():
    skip = LayerSkip(attention=(0,), ff=(1,))
    skipped = decoder_target(TARGET.config, skip=skip)
    assert skipped.halves is None
    assert skipped.spec.cache_shape == TARGET.target.spec.cache_shape
    params = jax.tree.map(lambda x: x, TARGET.params)
    silence = lambda dense: jax.tree.map(jnp.zeros_like, dense)
    params["blocks"]["0"]["attention"]["o"] = silence(
        params["blocks"]["0"]["attention"]["o"]
    )
    params["blocks"]["1"]["ff"]["down"] = silence(params["blocks"]["1"]["ff"]["down"])
    ids = jnp.asarray(TEXT[None, :20], jnp.int32)
    got, _, _ = skipped.forward(TARGET.params, ids, skipped.init_cache(1, CAPACITY))
    want, _, _ = TARGET.target.forward(
        params, ids, TARGET.target.init_cache(1, CAPACITY)
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_layer_skip_and_a_smaller_type_change_no_text():
    plain = complete(drafters.plain())
    skipping = drafters.layer_skip(TARGET, GAMMA, ff=(1,))
    assert skipping.params is None
    smaller = drafters.lower_precision(TARGET, GAMMA)
    sparse = drafters.sparse_kv(TARGET, GAMMA, sinks=1, window=2)
    kept = {}
    for draft in (skipping, smaller, sparse):
        done = complete(draft)
        assert [c.ids for c in done] == [c.ids for c in plain]
        kept[draft.drafter.spec.name] = sum(c.stats.accepted for c in done)
    # A bfloat16 copy is nearly the target; two thirds of it are not.
    assert kept["bfloat16"] > 40 and kept["bfloat16"] > kept["layer_skip"] > 0
    assert kept["sparse_kv"] > 0


def test_a_form_that_is_the_target_itself_is_always_right():
    """Greedy and under the target's own noise, whatever the rows' lengths."""
    twin = BoundDrafter(drafters.self_draft(TARGET.target, GAMMA), None)
    done = complete(twin)
    assert [c.ids for c in done] == [c.ids for c in complete(drafters.plain())]
    assert all(c.stats.accepted == c.stats.verified for c in done)
    assert sum(c.stats.accepted for c in done) > 40


def test_drafts_attend_to_the_start_and_the_end_only():
    """The form's forward against attention that is cut by hand."""
    budget = KVBudget(sinks=2, window=3)
    form = decoder_target(TARGET.config, budget=budget)
    ids = jnp.asarray(TEXT[None, :12], jnp.int32)
    _, _, cache = TARGET.target.forward(
        TARGET.params, ids, TARGET.target.init_cache(1, CAPACITY)
    )
    cache = TARGET.target.commit(cache, jnp.array([12]))
    token = jnp.asarray(TEXT[None, 12:13], jnp.int32)
    got, _, _ = form.forward(TARGET.params, token, cache)
    whole, _, _ = TARGET.target.forward(TARGET.params, token, cache)
    assert not np.allclose(got, whole, atol=1e-3)
    poisoned = jax.tree.map(lambda x: x.at[:, :, 2:10].set(9.0), cache.layers)
    again, _, _ = form.forward(TARGET.params, token, cache.replace(layers=poisoned))
    np.testing.assert_array_equal(got, again)


def test_a_self_draft_of_another_target_is_refused():
    deeper = dataclasses.replace(TARGET.config, n_layers=3)
    other = dataclasses.replace(TARGET, config=deeper, target=decoder_target(deeper))
    for draft in (
        drafters.layer_skip(other, GAMMA, ff=(1,)),
        drafters.early_exit(other.target, 1, GAMMA),
    ):
        with pytest.raises(ValueError, match=r"\(3, 1, 16\) a token.*this target's"):
            complete(draft)
    with pytest.raises(ValueError, match="runs on no other's"):
        alone = dataclasses.replace(TARGET.target.spec, cache_shape=())
        drafters.self_draft(TARGET.target._replace(spec=alone))


def test_a_converted_copy_computes_the_same_up_to_its_type():
    draft = drafters.lower_precision(TARGET, GAMMA)
    config = dataclasses.replace(TARGET.config, dtype="bfloat16")
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(draft.params))
    shape = lambda tree: jax.tree.map(jnp.shape, tree)
    # On this platform kernels of this type lie the other way round.
    assert shape(draft.params) != shape(TARGET.params)
    assert config.dtype != TARGET.config.dtype


def test_wrong_arguments_say_what_would_be_right():
    with pytest.raises(ValueError, match=r"exit_block=2 must be in \[1, 2\)"):
        drafters.early_exit(TARGET.target, 2)
    tapped = decoder_target(TARGET.config, (0,))
    with pytest.raises(ValueError, match="no halves"):
        drafters.early_exit(tapped, 1)
    wrapped = planted.tie_target(TARGET.target, (1, 2))
    with pytest.raises(ValueError, match="no halves"):
        drafters.early_exit(wrapped, 1)
    with pytest.raises(ValueError, match="leaves nothing out"):
        drafters.layer_skip(TARGET)
    with pytest.raises(ValueError, match="skip.ff=.1, 0. must be ascending"):
        drafters.layer_skip(TARGET, ff=(1, 0))
    with pytest.raises(ValueError, match="every block"):
        drafters.layer_skip(TARGET, attention=(0, 1))
    with pytest.raises(ValueError, match="no smaller type"):
        drafters.lower_precision(tiny_model(dtype="bfloat16"))
    with pytest.raises(ValueError, match="sinks=-1 must be at least 0"):
        drafters.sparse_kv(TARGET, sinks=-1)
    with pytest.raises(ValueError, match="sinks=4 and window=508 hold all of the"):
        drafters.sparse_kv(TARGET)
    with pytest.raises(ValueError, match="n_ids=99"):
        drafters.self_draft(TARGET.target, n_ids=99)
