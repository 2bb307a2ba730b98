"""Row sums with a written order, and reductions over a vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.ops.rows import row_sum
from specjax.ops.vocab import argmax, log_normalizer

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("width", [1, 2, 3, 5, 31, 64, 193, 576, 1537])
def test_row_sum_is_the_sum(width):
    x = np.random.default_rng(width).normal(size=(3, 2, width)).astype(np.float32)
    out = np.asarray(jax.jit(row_sum)(x))
    assert out.shape == (3, 2, 1)
    exact = x.astype(np.float64).sum(-1, keepdims=True)
    np.testing.assert_allclose(out, exact, atol=1e-6 * np.sqrt(width) * 4)
    # Each element counts once: in whole numbers the sum is exact.
    ints = np.arange(1, width + 1, dtype=np.float32) ** 2 % 97
    assert float(row_sum(jnp.asarray(ints))[0]) == ints.sum()


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(576, jnp.float32), (1537, jnp.float32), (576, jnp.bfloat16)],
)
def test_row_sum_is_invariant(width, dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(80, width)), dtype)
    total = jax.jit(row_sum)
    expected = np.asarray(total(x))
    rng = np.random.default_rng(1)
    for n in (1, 2, 3, 7, 8, 33, 40):
        start = int(rng.integers(0, 80 - n + 1))
        out = np.asarray(total(x[start : start + n]))
        assert out.tobytes() == expected[start : start + n].tobytes(), n


ARGMAX = [
    ([1.0, 3.0, 2.0], 1),
    ([3.0, 1.0, 3.0], 0),
    ([2.0, 2.0, 2.0], 0),
    ([-0.0, 0.0, -1.0], 0),
    ([-1.0, 0.0, -0.0], 1),
    ([-INF, -INF, -INF], 0),
    ([-INF, -INF, -1e30], 2),
    ([0.0, INF, INF], 1),
    ([NAN, 1.0, 2.0], 0),
    ([1.0, 2.0, NAN], 0),
]


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_argmax_takes_the_lowest_index(jit, dtype):
    scores = jnp.asarray([row for row, _ in ARGMAX], dtype)
    out = (jax.jit(argmax) if jit else argmax)(scores)
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, [index for _, index in ARGMAX])


def test_argmax_of_large_rows():
    rng = np.random.default_rng(2)
    scores = np.round(rng.normal(size=(2, 3, 49152)), 1).astype(np.float32)
    out = jax.jit(argmax)(scores)
    assert out.shape == (2, 3)
    np.testing.assert_array_equal(out, np.argmax(scores, axis=-1))
    scores[1, 1, 77] = NAN
    spoilt = np.array(jax.jit(argmax)(scores))
    spoilt[1, 1] = out[1, 1]
    np.testing.assert_array_equal(spoilt, out)


@pytest.mark.parametrize("size", [3, 1000, 49152])
def test_row_holding_nan_has_a_valid_argmax_and_a_nan_normalizer(size):
    scores = np.random.default_rng(4).normal(size=(3, size)).astype(np.float32)
    scores[[0, 1, 2], [0, size // 2, size - 1]] = NAN
    assert np.all(np.isnan(jax.jit(log_normalizer)(scores)))
    index = np.asarray(jax.jit(argmax)(scores))
    assert np.all((index >= 0) & (index < size))


def test_log_normalizer_is_the_float64_one():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(4, 2, 5000), scale=4)
    scores[1] += 1e4
    scores[2] -= 1e4
    scores[3, :, ::2] = -INF
    scores = scores.astype(np.float32)
    out = np.asarray(jax.jit(log_normalizer)(scores))
    wide = scores.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    exact = np.log(np.exp(wide - top).sum(-1)) + top[..., 0]
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("jit", [True, False])
def test_log_normalizer_of_rows_that_are_no_law(jit):
    compute = jax.jit(log_normalizer) if jit else log_normalizer
    rows = {
        (0.0, -INF, -INF): 0.0,
        (-INF, -INF, -INF): -INF,
        (NAN, 0.0, 1.0): NAN,
        (NAN, -INF, -INF): NAN,
        (3e38, 3e38, -3e38): 3e38,
        (1.0, 1.0, -INF): 1 + np.log(2),
    }
    out = np.asarray(compute(jnp.asarray(list(rows), jnp.float32)))
    np.testing.assert_allclose(out, list(rows.values()), rtol=1e-6)
    out = np.asarray(compute(jnp.asarray([(INF, 0.0, 1.0), (INF, NAN, -INF)])))
    assert not np.any(np.isfinite(out)) and out[0] != -INF
    low = compute(jnp.asarray([[1.0, 2.0]], jnp.bfloat16))
    assert low.dtype == jnp.float32
