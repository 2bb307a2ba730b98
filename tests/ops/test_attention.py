"""Cached attention against its definition, and what must change none of its bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.ops.attention import (
    KV_BLOCK,
    cached_attention,
    cached_attention_reference,
)
from specjax.ops.platform import row_invariant

SCALE, M = 0.25, 16
HEADS = [(4, 4), (6, 2), (3, 1)]


@functools.cache
def _compiled(invariant, window, sinks, by_row):
    """One jitted function a trace-time choice: the context is no part of jit's key."""

    def attend(q, keys, values, length, row=None):
        with row_invariant(invariant):
            return cached_attention(
                q,
                keys,
                values,
                length,
                scale=SCALE,
                window=window,
                sinks=sinks,
                row=row,
            )

    del by_row
    return jax.jit(attend)


def _attend(
    q, keys, values, length, *, window=None, sinks=0, row=None, invariant=False
):
    length = jnp.asarray(length, jnp.int32)
    function = _compiled(invariant, window, sinks, row is not None)
    if row is None:
        return np.asarray(function(q, keys, values, length))
    return np.asarray(function(q, keys, values, length, jnp.int32(row)))


def _case(
    batch, n_new, n_heads, n_kv, slots=KV_BLOCK, dtype=jnp.float32, seed=0, width=M
):
    rng = np.random.default_rng([seed, batch, n_new, n_heads, n_kv])
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q = draw(batch, n_new, n_heads, width) * 3
    keys, values = draw(batch, n_kv, slots, width), draw(batch, n_kv, slots, width)
    return q.astype(dtype), keys.astype(dtype), values.astype(dtype)


def _exact(q, keys, values, length, window=None, sinks=0):
    """The definition in float64, one head and one row at a time."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    batch, n_new, n_heads, _ = q.shape
    group = n_heads // keys.shape[1]
    out = np.zeros(q.shape)
    for b in range(batch):
        for t in range(n_new):
            last = length[b] + t
            first = 0 if window is None else max(0, last - window + 1)
            seen = [*range(min(sinks, first)), *range(first, last + 1)]
            for h in range(n_heads):
                k, v = keys[b, h // group, seen], values[b, h // group, seen]
                s = k @ q[b, t, h] * SCALE
                w = np.exp(s - s.max())
                out[b, t, h] = (w / w.sum()) @ v
    return out


@pytest.mark.parametrize(
    ("heads", "window", "slots"),
    [
        ((4, 4), None, KV_BLOCK),
        ((4, 4), 7, 3 * KV_BLOCK),
        ((6, 2), None, 3 * KV_BLOCK),
        ((6, 2), 7, 3 * KV_BLOCK),
        ((6, 2), 300, 3 * KV_BLOCK),
        ((6, 2), 1, KV_BLOCK),
        ((3, 1), None, 3 * KV_BLOCK),
    ],
)
def test_equals_the_definition(heads, window, slots):
    n_new = 5
    q, keys, values = _case(3, n_new, *heads, slots)
    rng = np.random.default_rng(0)
    for length in ([0, 1, slots - n_new], rng.integers(0, slots - n_new, 3)):
        out = _attend(q, keys, values, length, window=window)
        exact = _exact(q, keys, values, length, window)
        reference = cached_attention_reference(
            q, keys, values, jnp.asarray(length), scale=SCALE, window=window
        )
        close = functools.partial(np.allclose, exact, atol=2e-5, rtol=0)
        assert out.dtype == np.float32 and close(out) and close(reference)
        # Wrong answers do not pass.
        assert np.sqrt(np.mean(exact**2)) > 2e-4
        assert not close(np.zeros_like(out))
        for axis in range(3):
            if out.shape[axis] > 1:
                assert not close(np.roll(out, 1, axis=axis))
        assert not close(_attend(q, keys, keys, length, window=window))
        assert not close(_attend(q, keys, values, np.add(length, 1), window=window))
        if window == 7:
            assert not close(_attend(q, keys, values, length))
            assert not close(_attend(q, keys, values, length, window=8))


@pytest.mark.parametrize(
    ("sinks", "window", "n_blocks"),
    [(1, 7, 4), (4, 300, 4), (KV_BLOCK, 7, 4), (300, 7, 4), (600, 500, 4), (4, 7, 1)],
)
def test_sinks_are_seen_besides_the_window(sinks, window, n_blocks):
    """Rows of very different lengths, each with blocks of its own."""
    n_new, slots = 3, n_blocks * KV_BLOCK
    q, keys, values = _case(4, n_new, 6, 2, slots)
    length = np.array([0, window + 3, slots // 2, slots - n_new])
    kind = dict(window=window, sinks=sinks)
    out = _attend(q, keys, values, length, **kind)
    exact = _exact(q, keys, values, length, window, sinks)
    np.testing.assert_allclose(out, exact, atol=2e-5)
    reference = cached_attention_reference(
        q, keys, values, jnp.asarray(length), scale=SCALE, **kind
    )
    np.testing.assert_allclose(reference, exact, atol=2e-5)
    assert not np.allclose(_attend(q, keys, values, length, window=window), exact)
    for row in range(4):
        one = slice(row, row + 1)
        alone = _attend(q[one], keys[one], values[one], length[one], **kind)
        np.testing.assert_allclose(alone, out[one], atol=2e-6)


def test_what_lies_between_sinks_and_window_is_not_read():
    q, keys, values = _case(2, 1, 6, 2, 6 * KV_BLOCK)
    length = np.array([5 * KV_BLOCK, 6 * KV_BLOCK - 1])
    kind = dict(window=7, sinks=4)
    before = _attend(q, keys, values, length, **kind)
    # Whole blocks: read at all, NaN would spread.
    spoilt = [x.at[:, :, KV_BLOCK : 4 * KV_BLOCK].set(np.nan) for x in (keys, values)]
    np.testing.assert_array_equal(_attend(q, *spoilt, length, **kind), before)


def test_bfloat16_is_computed_in_float32():
    q, keys, values = _case(2, 3, 6, 2, dtype=jnp.bfloat16)
    out = _attend(q, keys, values, [20, 200])
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, _exact(q, keys, values, [20, 200]), atol=2e-5)


@pytest.mark.parametrize(("window", "invariant"), [(None, True), (7, False)])
def test_one_addressed_row(window, invariant):
    q, keys, values = _case(4, 5, 6, 2, 2 * KV_BLOCK)
    length = [3, 300, 0, 251]
    for row in range(4):
        one = slice(row, row + 1)
        kind = dict(window=window, invariant=invariant)
        out = _attend(q[one], keys, values, length[one], row=row, **kind)
        alone = _attend(q[one], keys[one], values[one], length[one], **kind)
        assert out.tobytes() == alone.tobytes()
        exact = _exact(q[one], keys[one], values[one], length[one], window)
        np.testing.assert_allclose(out, exact, atol=2e-5)


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize(("window", "invariant"), [(None, True), (7, False)])
def test_junk_beyond_the_length_changes_no_bit(junk, invariant, window):
    q, keys, values = _case(3, 4, 6, 2, 3 * KV_BLOCK)
    length = np.array([0, 250, 600])
    kind = dict(window=window, invariant=invariant)
    before = _attend(q, keys, values, length, **kind)
    beyond = np.arange(3 * KV_BLOCK)[None, :] >= (length + 4)[:, None]
    spoil = lambda x, at: jnp.where(at[:, None, :, None], junk, x)
    after = _attend(q, spoil(keys, beyond), spoil(values, beyond), length, **kind)
    assert np.all(np.isfinite(before))
    assert after.tobytes() == before.tobytes()
    # The last live slot is not beyond.
    live = np.arange(3 * KV_BLOCK)[None, :] == (length + 3)[:, None]
    seen = _attend(q, keys, spoil(values, live), length, **kind)
    assert not np.allclose(seen[:, -1], before[:, -1])


@pytest.mark.parametrize("heads", HEADS[:2])
@pytest.mark.parametrize("invariant", [False, True])
def test_empty_blocks_change_no_bit(heads, invariant):
    q, keys, values = _case(2, 4, *heads)
    length = [17, 250]
    before = _attend(q, keys, values, length, invariant=invariant)
    longer = lambda x: jnp.pad(
        x, ((0, 0), (0, 0), (0, 2 * KV_BLOCK), (0, 0)), constant_values=np.nan
    )
    after = _attend(q, longer(keys), longer(values), length, invariant=invariant)
    assert after.tobytes() == before.tobytes()


@pytest.mark.parametrize("heads", HEADS[:2])
@pytest.mark.parametrize("window", [None, 9])
def test_neighbours_change_no_bit(heads, window):
    # A neighbour that is much longer makes every row visit its blocks too.
    q, keys, values = _case(3, 4, *heads, 3 * KV_BLOCK)
    kind = dict(window=window, invariant=True)
    before = _attend(q, keys, values, [5, 100, 20], **kind)
    after = _attend(q, keys, values, [5, 700, 20], **kind)
    others = np.array([0, 2])
    assert after[others].tobytes() == before[others].tobytes()
    assert after[1].tobytes() != before[1].tobytes()
    for junk in (np.nan, 1e30):
        spoilt = [x.at[1].set(junk) for x in (q, keys, values)]
        after = _attend(*spoilt, [5, 700, 20], **kind)
        assert after[others].tobytes() == before[others].tobytes()
    for r in range(3):
        one = slice(r, r + 1)
        alone = _attend(q[one], keys[one], values[one], [[5, 100, 20][r]], **kind)
        assert alone.tobytes() == before[one].tobytes()


def _differing(heads, dtype, invariant, counts, width=M):
    """Returns the pass widths at which some row has other bits than in a pass of 8."""
    q, keys, values = _case(1, 80, *heads, 2 * KV_BLOCK, dtype=dtype, width=width)
    first = KV_BLOCK - 30
    run = lambda start, n: _attend(
        q[:, start : start + n], keys, values, [first + start], invariant=invariant
    )
    expected = np.concatenate([run(i, 8) for i in range(0, 80, 8)], axis=1)
    rng = np.random.default_rng(1)
    bad = []
    for n in counts:
        start = int(rng.integers(0, 80 - n + 1))
        if run(start, n).tobytes() != expected[:, start : start + n].tobytes():
            bad.append(n)
    return bad


@pytest.mark.parametrize(
    ("heads", "dtype", "counts"),
    [
        ((4, 4), jnp.float32, (1, 2, 3, 20)),
        ((6, 2), jnp.float32, (1, 2, 3, 5, 7, 20)),
        ((6, 2), jnp.bfloat16, (1, 2, 20)),
        ((3, 1), jnp.float32, (1, 2, 20)),
    ],
)
def test_rows_are_invariant(heads, dtype, counts):
    assert _differing(heads, dtype, True, counts) == []


@pytest.mark.parametrize("width", [16, 32, 64])
def test_rows_of_wide_passes_are_invariant(width):
    # Queries of a group are rows of one product: 21 rows of 3 heads make 63.
    assert _differing((6, 2), jnp.float32, True, (21, 40), width) == []


def test_rows_of_narrow_heads_are_invariant():
    assert _differing((4, 4), jnp.float32, True, (1, 2, 5, 10), 8) == []


def test_without_the_context_rows_know_their_number():
    bad = [_differing(heads, jnp.float32, False, (1, 2)) for heads in HEADS[::2]]
    if not any(bad):
        pytest.skip("attention here rounds alike without row_invariant as well")


def test_unfit_shapes_are_refused():
    q, keys, values = _case(2, 3, 6, 2)
    length = jnp.zeros((2,), jnp.int32)
    call = functools.partial(cached_attention, scale=SCALE)
    with pytest.raises(ValueError, match="do not agree"):
        call(q, keys, values[:, :, :-1], length)
    with pytest.raises(ValueError, match="do not agree"):
        call(q[..., :-1], keys, values, length)
    with pytest.raises(ValueError, match=r"n_heads=5 .*n_kv=2"):
        call(q[:, :, :5], keys, values, length)
    with pytest.raises(ValueError, match=r"slots=200 .*256"):
        call(q, keys[:, :, :200], values[:, :, :200], length)
    with pytest.raises(ValueError, match=r"n_rows=1 .*2 rows.*row="):
        call(q[:1], keys, values, length[:1])
    with pytest.raises(ValueError, match=r"n_rows=2 .*row="):
        call(q, keys, values, length, row=jnp.int32(0))
