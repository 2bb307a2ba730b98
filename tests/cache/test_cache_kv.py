"""The write-ahead law of the key/value cache, and its capacity check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cache import (
    LayerKV,
    check_capacity,
    commit,
    copy_row,
    init_cache,
    reset_row,
    write,
)
from specjax.ops.attention import KV_BLOCK, cached_attention

K, M = 2, 8


def _cache(batch=2, capacity=40, n_layers=1, dtype=jnp.float32):
    return init_cache(
        batch=batch,
        capacity=capacity,
        n_layers=n_layers,
        n_kv_heads=K,
        head_width=M,
        dtype=dtype,
        block=16,
        slack=8,
    )


def _rows(seed, n_rows, n_new, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    draw = lambda: jnp.asarray(rng.normal(size=(n_rows, n_new, K, M)), dtype)
    return draw(), draw()


def _bits(x):
    return np.asarray(x).tobytes()


def test_empty_cache_has_room_in_whole_blocks():
    cache = _cache(batch=3, capacity=40, n_layers=2, dtype=jnp.bfloat16)
    assert len(cache.layers) == 2 and cache.capacity == 40
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (3, K, 48, M)
        assert layer.keys.dtype == jnp.bfloat16
        assert not np.any(layer.keys) and not np.any(layer.values)
    np.testing.assert_array_equal(cache.length, [0, 0, 0])
    assert cache.length.dtype == jnp.int32
    # 41 + 8 slots need a fourth block.
    assert _cache(capacity=41).layers[0].keys.shape[2] == 64


@pytest.mark.parametrize(("batch", "capacity"), [(0, 8), (2, 0), (-1, 8)])
def test_empty_sizes_are_refused(batch, capacity):
    with pytest.raises(ValueError, match=f"batch={batch}.*capacity={capacity}"):
        _cache(batch=batch, capacity=capacity)


def test_capacity_is_static():
    cache = _cache()
    leaves = jax.tree.leaves(cache)
    assert len(leaves) == 3
    assert jax.tree.structure(cache) != jax.tree.structure(_cache(capacity=41))


def test_write_touches_its_slots_and_no_length():
    cache = _cache()
    lengths = jnp.asarray([3, 11], jnp.int32)
    cache = commit(cache, lengths)
    keys, values = _rows(0, 2, 5)
    poison = LayerKV(*(jnp.full_like(x, 7.0) for x in cache.layers[0]))
    layer = write(poison, keys, values, cache.length)
    for new, whole in zip((keys, values), layer, strict=True):
        whole = np.asarray(whole)
        for r, start in enumerate((3, 11)):
            np.testing.assert_array_equal(
                whole[r, :, start : start + 5], np.asarray(new[r]).transpose(1, 0, 2)
            )
            np.testing.assert_array_equal(whole[r, :, :start], 7.0)
            np.testing.assert_array_equal(whole[r, :, start + 5 :], 7.0)
    np.testing.assert_array_equal(cache.length, lengths)


def test_commit_moves_lengths_and_nothing_else():
    cache = _cache(batch=3)
    before = _bits(cache.layers[0].keys)
    cache = commit(cache, jnp.asarray([2, 0, 5], jnp.int32))
    cache = commit(cache, jnp.asarray([1, 0, 1], jnp.int32))
    np.testing.assert_array_equal(cache.length, [3, 0, 6])
    assert _bits(cache.layers[0].keys) == before


def test_write_rounds_to_the_caches_dtype():
    cache = _cache(dtype=jnp.bfloat16)
    keys, values = _rows(1, 2, 4)
    layer = write(cache.layers[0], keys, values, cache.length)
    assert layer.keys.dtype == jnp.bfloat16
    expected = keys.astype(jnp.bfloat16).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(layer.keys[:, :, :4], expected)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("row", [0, 2])
def test_write_to_one_row(jit, row):
    cache = _cache(batch=3)
    poison = LayerKV(*(jnp.full_like(x, jnp.nan) for x in cache.layers[0]))
    keys, values = _rows(2, 1, 6)
    put = jax.jit(write) if jit else write
    layer = put(poison, keys, values, jnp.asarray([9], jnp.int32), jnp.int32(row))
    for new, whole in zip((keys, values), layer, strict=True):
        whole = np.array(whole)
        np.testing.assert_array_equal(
            whole[row, :, 9:15], np.asarray(new[0]).transpose(1, 0, 2)
        )
        whole[row, :, 9:15] = np.nan
        assert np.all(np.isnan(whole))


def test_one_row_write_equals_the_batch_write():
    cache = _cache(batch=3)
    lengths = jnp.asarray([0, 7, 20], jnp.int32)
    keys, values = _rows(3, 3, 4)
    whole = write(cache.layers[0], keys, values, lengths)
    layer = cache.layers[0]
    for r in range(3):
        at = slice(r, r + 1)
        layer = write(layer, keys[at], values[at], lengths[at], jnp.int32(r))
    assert _bits(whole.keys) == _bits(layer.keys)
    assert _bits(whole.values) == _bits(layer.values)


def test_reset_row_empties_one_row():
    cache = commit(_cache(batch=3), jnp.asarray([4, 5, 6], jnp.int32))
    for row, expected in ((1, [4, 0, 6]), (0, [0, 5, 6])):
        np.testing.assert_array_equal(
            jax.jit(reset_row)(cache, jnp.int32(row)).length, expected
        )


def _attend(layer, seed, n_new, length, window=None):
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(layer.keys.shape[0], n_new, 2 * K, M)))
    return cached_attention(
        q.astype(jnp.float32), *layer, length, scale=0.3, window=window
    )


@pytest.mark.parametrize("window", [None, 3])
def test_rollback_is_doing_nothing(window):
    # Passes of 5 rows, of which n are committed and the others rejected, against the
    # committed rows alone. The window is shorter than a pass: a ring of ``window``
    # slots would have lost keys to rejected rows.
    lengths, batch = np.zeros(2, np.int64), 2
    make = lambda: init_cache(
        batch=batch,
        capacity=60,
        n_layers=1,
        n_kv_heads=K,
        head_width=M,
        dtype=jnp.float32,
        block=KV_BLOCK,
        slack=8,
    )
    speculative, plain = make(), make()
    put, attend = jax.jit(write), jax.jit(_attend, static_argnums=(1, 2, 4))
    rng = np.random.default_rng(4)
    for step in range(5):
        kept = rng.integers(1, 6, size=batch)
        keys, values = _rows(100 + step, batch, 5)
        keys = np.array(keys)
        layer = put(speculative.layers[0], keys, values, speculative.length)
        speculative = speculative.replace(layers=(layer,))
        speculative = commit(speculative, jnp.asarray(kept, jnp.int32))
        layer = plain.layers[0]
        for r in range(batch):
            for t in range(kept[r]):
                at = (slice(r, r + 1), slice(t, t + 1))
                where = jnp.asarray([lengths[r] + t], jnp.int32)
                layer = put(layer, keys[at], values[at], where, jnp.int32(r))
        lengths += kept
        plain = plain.replace(layers=(layer,), length=jnp.asarray(lengths, jnp.int32))
        np.testing.assert_array_equal(speculative.length, plain.length)
        # The next pass's rows see the same past in both.
        keys, values = _rows(200 + step, batch, 4)
        outs = [
            attend(put(c.layers[0], keys, values, c.length), step, 4, c.length, window)
            for c in (speculative, plain)
        ]
        assert _bits(outs[0]) == _bits(outs[1])
        # It is no empty comparison: one committed key changed is seen.
        spoilt = put(speculative.layers[0], keys, values, speculative.length)
        last = int(lengths[0]) - 1
        spoilt = spoilt._replace(keys=spoilt.keys.at[0, :, last].add(1.0))
        changed = attend(spoilt, step, 4, speculative.length, window)
        assert _bits(changed[0]) != _bits(outs[0][0])
        assert _bits(changed[1]) == _bits(outs[0][1])


@pytest.mark.parametrize("prompt", range(94, 101))
def test_capacity_says_the_numbers(prompt):
    fit = dict(max_new_tokens=2, gamma=2, capacity=100)
    # 95 + 2 + 2 + 1 is exactly 100.
    if prompt <= 95:
        check_capacity(prompt_length=prompt, **fit)
        return
    with pytest.raises(ValueError) as error:
        check_capacity(prompt_length=prompt, **fit)
    message = str(error.value)
    for part in (
        f"needs {prompt + 5} cache slots",
        f"prompt {prompt} ",
        "max_new_tokens 2 ",
        "gamma 2 ",
        "a row holds 100",
    ):
        assert part in message, message


@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 7])
def test_capacity_check_covers_what_passes_write(gamma, max_new_tokens):
    capacity = 20
    fits = []
    for prompt in range(1, 25):
        try:
            check_capacity(
                prompt_length=prompt,
                max_new_tokens=max_new_tokens,
                gamma=gamma,
                capacity=capacity,
            )
        except ValueError:
            continue
        fits.append(prompt)
        # A pass starts while a token is missing, with all committed tokens but the
        # pending one in the cache, and writes gamma + 1 rows from there.
        most = prompt + max_new_tokens - 1
        assert (most - 1) + gamma + 1 <= capacity
    assert fits == list(range(1, capacity - max_new_tokens - gamma))


@pytest.mark.parametrize("length", [0, 1, 255, 256, 300, 512])
def test_a_row_is_copied_as_far_as_its_length(length):
    rng = np.random.default_rng(length)
    cache = init_cache(
        batch=3,
        capacity=500,
        n_layers=2,
        n_kv_heads=1,
        head_width=4,
        dtype=jnp.float32,
        block=256,
        slack=12,
    )
    noise = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)
    cache = cache.replace(layers=jax.tree.map(noise, cache.layers))
    cache = cache.replace(length=jnp.asarray([400, 3, 500], jnp.int32))
    got = jax.jit(copy_row)(cache, 2, 1, length)
    np.testing.assert_array_equal(got.length, [400, length, 500])
    covered = -(-length // 256) * 256
    for old, new in zip(
        jax.tree.leaves(cache.layers), jax.tree.leaves(got.layers), strict=True
    ):
        np.testing.assert_array_equal(new[0], old[0])
        np.testing.assert_array_equal(new[2], old[2])
        np.testing.assert_array_equal(new[1, :, :covered], old[2, :, :covered])
        np.testing.assert_array_equal(new[1, :, covered:], old[1, :, covered:])


def test_a_cache_without_layers_copies_its_length():
    cache = init_cache(
        batch=2,
        capacity=8,
        n_layers=0,
        n_kv_heads=1,
        head_width=4,
        dtype=jnp.float32,
        block=8,
        slack=0,
    ).replace(length=jnp.asarray([5, 2], jnp.int32))
    got = jax.jit(copy_row)(cache, 0, 1, 4)
    np.testing.assert_array_equal(got.length, [5, 4])
