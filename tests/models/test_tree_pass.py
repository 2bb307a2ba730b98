"""A pass over a tree scores each path as a chain of it would be scored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import trees
from specjax.models import KVBudget, decoder_target, init_params
from specjax.ops.attention import (
    KV_BLOCK,
    cached_attention,
    cached_attention_reference,
)
from specjax.testing import tiny_model

VOCAB, CAPACITY = 17, 320
TREE = trees.Topology((-1, -1, 0, 0, 1, 2, 5))
MODELS = {
    "full": tiny_model(2, vocab_size=VOCAB),
    "window": tiny_model(2, vocab_size=VOCAB, windows=(3, None)),
}
TEXT = np.random.default_rng(0).integers(0, VOCAB, 300)


def started(model, lengths, target=None):
    """A cache that holds a text of each length."""
    target = target or model.target
    cache = target.init_cache(len(lengths), CAPACITY)
    tokens = jnp.asarray(np.stack([TEXT[: max(lengths)]] * len(lengths)), jnp.int32)
    _, _, cache = target.forward(model.params, tokens, cache, with_logits=False)
    return target.commit(cache, jnp.asarray(lengths, jnp.int32))


def rows_of(node, tree=TREE):
    """Pass rows from the pending token down to a node."""
    path = []
    while node >= 0:
        path.append(node + 1)
        node = tree.parents[node]
    return [0, *path[::-1]]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_each_path_is_scored_as_a_chain(name, dynamic):
    model, lengths = MODELS[name], [4, 253]
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, TREE.n_nodes + 1)), jnp.int32)
    layout = trees.pass_layout(TREE.arrays((2,)) if dynamic else TREE)
    cache = started(model, lengths)
    forward = jax.jit(model.target.forward)
    logits, features, after = forward(model.params, tokens, cache, layout=layout)
    assert model.target.gather_path is not None
    for node in (3, 4, 6):
        rows = jnp.asarray(rows_of(node))
        chain, seen, written = forward(model.params, tokens[:, rows], cache)
        np.testing.assert_allclose(logits[:, rows], chain, atol=2e-5)
        np.testing.assert_allclose(features.last[:, rows], seen.last, atol=2e-5)
        # Gathered and committed, the path is a text like any other.
        path = jnp.full((2, 4), -1).at[:, : len(rows) - 1].set(rows[1:] - 1)
        n = jnp.full((2,), len(rows), jnp.int32)
        kept = model.target.gather_path(after, path, TREE.n_nodes)
        more = jnp.asarray([[3], [5]], jnp.int32)
        got, _, _ = forward(model.params, more, model.target.commit(kept, n))
        want, _, _ = forward(model.params, more, model.target.commit(written, n))
        np.testing.assert_allclose(got, want, atol=2e-5)
    # A wrong shape shows.
    other = trees.pass_layout(trees.Topology((-1, 0, -1, 0, 1, 2, 5)))
    wrong, _, _ = forward(model.params, tokens, cache, layout=other)
    assert np.abs(wrong - logits).max() > 1e-2


def test_nothing_of_a_rejected_node_is_seen_again():
    """Its keys and values are poisoned, in the slots where the pass wrote them."""
    model, target = MODELS["full"], MODELS["full"].target
    cache = started(model, [5, 9])
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (2, TREE.n_nodes + 1)), jnp.int32)
    layout = trees.pass_layout(TREE)
    _, _, after = target.forward(model.params, tokens, cache, layout=layout)
    path, n = jnp.asarray([[1, 4, -1], [0, 2, 5]]), jnp.asarray([3, 4])
    rejected = np.ones((2, TREE.n_nodes), bool)
    for row, nodes in enumerate(([1, 4], [0, 2, 5])):
        rejected[row, nodes] = False
    spoilt = after.layers
    for row in range(2):
        for node in np.flatnonzero(rejected[row]):
            at = int(cache.length[row]) + 1 + int(node)
            poison = lambda x, row=row, at=at: x.at[row, :, at].set(jnp.nan)
            spoilt = jax.tree.map(poison, spoilt)
    more = jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int32)
    results = []
    for layers in (after.layers, spoilt):
        kept = target.gather_path(after.replace(layers=layers), path, TREE.n_nodes)
        results.append(target.forward(model.params, more, target.commit(kept, n))[0])
    np.testing.assert_array_equal(*results)
    assert np.all(np.isfinite(results[0]))


def test_a_chain_as_a_tree_is_the_chain():
    model = MODELS["full"]
    cache = started(model, [7])
    tokens = jnp.asarray(TEXT[None, 7:12], jnp.int32)
    layout = trees.pass_layout(trees.chain(4))
    forward = jax.jit(model.target.forward)
    got, _, one = forward(model.params, tokens, cache, layout=layout)
    want, _, two = forward(model.params, tokens, cache)
    np.testing.assert_allclose(got, want, atol=1e-6)
    path = jnp.arange(4)[None, :]
    moved = model.target.gather_path(one, path, 4)
    jax.tree.map(np.testing.assert_array_equal, moved.layers, one.layers)
    assert jax.tree.structure(two) == jax.tree.structure(one)


@pytest.mark.parametrize(
    ("window", "sinks"), [(None, 0), (3, 0), (3, 2), (300, 0), (5, 300)]
)
@pytest.mark.parametrize("at", [0, 250, 2 * KV_BLOCK])
def test_attention_equals_the_definition(window, sinks, at):
    rng = np.random.default_rng(at)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    size = TREE.n_nodes + 1
    q, keys = draw(2, size, 4, 16) * 3, draw(2, 2, 3 * KV_BLOCK, 16)
    values = draw(2, 2, 3 * KV_BLOCK, 16)
    length = jnp.asarray([at, 11])
    layout = trees.pass_layout(TREE.arrays((2,)))
    kind = dict(scale=0.25, window=window, sinks=sinks)
    got = cached_attention(q, keys, values, length, layout=layout, **kind)
    want = cached_attention_reference(q, keys, values, length, layout=layout, **kind)
    np.testing.assert_allclose(got, want, atol=2e-5)
    causal = cached_attention(q, keys, values, length, **kind)
    assert not np.allclose(got, causal, atol=1e-3)
    turned = layout._replace(mask=layout.mask[:, ::-1, ::-1])
    turned = cached_attention(q, keys, values, length, layout=turned, **kind)
    assert not np.allclose(got, turned, atol=1e-3)


def test_a_budget_counts_from_where_a_row_stands():
    model = MODELS["full"]
    form = decoder_target(model.config, budget=KVBudget(sinks=1, window=2))
    params = init_params(model.config, 3)
    cache = form.init_cache(1, CAPACITY)
    tokens = jnp.asarray(TEXT[None, :8], jnp.int32)
    layout = trees.pass_layout(TREE)
    logits, _, _ = form.forward(params, tokens, cache, layout=layout)
    rows = jnp.asarray(rows_of(6))
    chain, _, _ = form.forward(params, tokens[:, rows], cache)
    np.testing.assert_allclose(logits[:, rows], chain, atol=2e-5)


def test_a_layout_of_another_size_is_refused():
    model = MODELS["full"]
    tokens = jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="layout of 8 rows is not that of a pass of 3"):
        model.target.forward(
            model.params,
            tokens,
            started(model, [4]),
            layout=trees.pass_layout(TREE),
        )
