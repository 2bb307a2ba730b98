"""The linear operation against float64, and rows that do not know their number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.ops.linear import (
    linear,
    linear_group,
    linear_reference,
    preferred_layout,
)
from specjax.ops.platform import (
    compiler_options,
    current_platform,
    is_row_invariant,
    row_invariant,
    target_platform,
)

LAYOUTS = ("in_out", "out_in")
DTYPES = (jnp.float32, jnp.bfloat16)


def _case(n_rows, n_in, n_out, layout, dtype, seed=0):
    rng = np.random.default_rng([seed, n_in, n_out])
    x = jnp.asarray(rng.normal(size=(n_rows, n_in)), jnp.float32)
    shape = (n_in, n_out) if layout == "in_out" else (n_out, n_in)
    return x, jnp.asarray(rng.normal(size=shape), dtype)


def _exact(x, kernel, layout):
    """Float64 product of the operands as the operation sees them."""
    x = np.asarray(x.astype(kernel.dtype), np.float64)
    kernel = np.asarray(kernel, np.float64)
    return x @ (kernel if layout == "in_out" else kernel.T)


def _atol(n_in):
    return 5e-7 * np.sqrt(n_in) * 4


def _assert_close_with_teeth(out, exact, atol):
    """Compares, and checks that wrong answers would not have passed."""
    assert np.sqrt(np.mean(exact**2)) > 10 * atol
    close = lambda y: np.allclose(y, exact, atol=atol, rtol=0)
    assert close(out), np.abs(out - exact).max()
    assert not close(np.zeros_like(exact))
    assert not close(np.roll(out, 1, axis=-1))
    if len(out) > 1:
        assert not close(np.roll(out, 1, axis=0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 10), (37, 13)])
def test_product_is_the_float64_one(n_in, n_out, layout, dtype):
    for n_rows in (1, 3, 40):
        x, kernel = _case(n_rows, n_in, n_out, layout, dtype)
        exact = _exact(x, kernel, layout)
        for invariant in (False, True):
            with row_invariant(invariant):
                out = jax.jit(lambda x, k: linear(x, k, layout=layout))(x, kernel)
            assert out.dtype == jnp.float32 and out.shape == (n_rows, n_out)
            if n_out > 1:
                _assert_close_with_teeth(np.asarray(out), exact, _atol(n_in))
            else:
                np.testing.assert_allclose(out, exact, atol=_atol(n_in))
        reference = linear_reference(x, kernel, layout=layout)
        np.testing.assert_allclose(reference, exact, atol=_atol(n_in))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(576,), (2, 3, 576), (1, 1, 576)])
def test_leading_shape_is_kept(layout, shape):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    for dtype in DTYPES:
        _, kernel = _case(1, 576, 24, layout, dtype)
        for invariant in (False, True):
            with row_invariant(invariant):
                out = linear(x, kernel, layout=layout)
            assert out.shape == (*shape[:-1], 24)
            exact = _exact(x.reshape(-1, 576), kernel, layout).reshape(out.shape)
            np.testing.assert_allclose(out, exact, atol=_atol(576))


@pytest.mark.parametrize("n_out", [1, 7, 8, 10, 13, 16, 17, 333])
def test_one_row_in_bfloat16(n_out):
    # Two lanes of four sums and a tail: sizes around multiples of 8.
    x, kernel = _case(1, 100, n_out, "out_in", jnp.bfloat16)
    with target_platform("cpu"):
        product = jax.jit(lambda x, k: linear(x, k, layout="out_in"))
        out = np.asarray(product(x, kernel))
        jaxpr = str(jax.make_jaxpr(product)(x, kernel))
    exact = _exact(x, kernel, "out_in")
    # The path that is meant: a loop of sums, no dot.
    assert "dot_general" not in jaxpr
    assert out.shape == (1, n_out) and out.dtype == np.float32
    np.testing.assert_allclose(out, exact, atol=_atol(100))
    if n_out > 1:
        _assert_close_with_teeth(out, exact, _atol(100))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_is_each_product(layout, dtype):
    for n_rows in (1, 4):
        cases = [_case(n_rows, 100, n, layout, dtype) for n in (24, 13)]
        x, kernels = cases[0][0], tuple(kernel for _, kernel in cases)
        for invariant in (False, True):
            with row_invariant(invariant):
                group = linear_group(x, kernels, layout=layout)
                alone = [linear(x, kernel, layout=layout) for kernel in kernels]
            assert len(group) == 2
            for together, single, kernel in zip(group, alone, kernels, strict=True):
                np.testing.assert_allclose(
                    together, _exact(x, kernel, layout), atol=_atol(100)
                )
                if invariant:
                    np.testing.assert_array_equal(together, single)


def test_activations_are_rounded_to_the_kernels_dtype():
    x = jnp.full((1, 8), 1 + 2.0**-12, jnp.float32)
    for n_rows in (1, 4):
        for layout in LAYOUTS:
            shape = (8, 16) if layout == "in_out" else (16, 8)
            rows = jnp.tile(x, (n_rows, 1))
            out = linear(rows, jnp.ones(shape, jnp.bfloat16), layout=layout)
            np.testing.assert_array_equal(out, 8.0)
            out = linear(rows, jnp.ones(shape, jnp.float32), layout=layout)
            np.testing.assert_array_equal(out, 8 * (1 + 2.0**-12))


def _differing(n_in, n_out, layout, dtype, invariant, counts):
    """Returns the row counts at which some row has other bits than in a pass of 8.

    Rows come from anywhere in a pool, so that a row stands at many indices.
    """
    x, kernel = _case(80, n_in, n_out, layout, dtype)
    product = jax.jit(lambda x, k: linear(x, k, layout=layout))
    rng = np.random.default_rng(1)
    bad = []
    with row_invariant(invariant):
        expected = np.concatenate(
            [product(x[i : i + 8], kernel) for i in range(0, 80, 8)]
        )
        for n in counts:
            start = int(rng.integers(0, 80 - n + 1))
            out = np.asarray(product(x[start : start + n], kernel))
            if out.tobytes() != expected[start : start + n].tobytes():
                bad.append(n)
    return bad


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_in", "n_out"), [(576, 1536), (576, 192), (100, 13)])
def test_rows_are_invariant(n_in, n_out, layout, dtype):
    counts = (1, 2, 3, 5, 40)
    if (n_out, layout, dtype) == (192, "in_out", jnp.float32):
        counts = range(1, 41)
    assert _differing(n_in, n_out, layout, dtype, True, counts) == []


def test_rows_are_invariant_for_a_vocabulary():
    counts = (1, 2, 3, 5, 8, 31, 33, 40)
    assert _differing(64, 49152, "in_out", jnp.float32, True, counts) == []


def test_without_the_context_rows_know_their_number():
    # A negative control: were this empty, the tests above would show nothing.
    bad = {
        (layout, dtype.__name__): _differing(
            576, 192, layout, dtype, False, (1, 2, 4, 34, 40)
        )
        for layout in LAYOUTS
        for dtype in DTYPES
    }
    if not any(bad.values()):
        pytest.skip("every product here rounds alike without row_invariant as well")


def test_neighbours_change_no_bit():
    for layout in LAYOUTS:
        x, kernel = _case(6, 576, 64, layout, jnp.float32)
        product = jax.jit(lambda x, k, layout=layout: linear(x, k, layout=layout))
        with row_invariant():
            before = np.asarray(product(x, kernel))
            for junk in (0.0, 1e30, np.nan):
                after = np.asarray(product(x.at[2].set(junk), kernel))
                others = np.arange(6) != 2
                assert after[others].tobytes() == before[others].tobytes()


def test_context_ends():
    assert not is_row_invariant()
    with row_invariant():
        assert is_row_invariant()
        with row_invariant(False):
            assert not is_row_invariant()
        assert is_row_invariant()
    with pytest.raises(KeyError), row_invariant():
        raise KeyError
    assert not is_row_invariant()


def test_unfit_arguments_are_refused():
    x, kernel = jnp.zeros((2, 4)), jnp.zeros((4, 6))
    with pytest.raises(ValueError, match=r"'sideways'.*'in_out' or 'out_in'"):
        linear(x, kernel, layout="sideways")
    with pytest.raises(ValueError, match=r"width 4.*\(4, 6\) \(out_in\) takes 6"):
        linear(x, kernel, layout="out_in")
    with pytest.raises(ValueError, match="width 5"):
        linear(jnp.zeros((2, 5)), kernel)


def test_platform():
    assert current_platform() == jax.default_backend()
    with target_platform("tpu"):
        assert current_platform() == "tpu"
        assert preferred_layout(jnp.bfloat16) == "out_in"
        assert compiler_options() is None
    assert preferred_layout(jnp.bfloat16, "cpu") == "out_in"
    assert preferred_layout(jnp.float32, "cpu") == "in_out"
    assert preferred_layout(jnp.float32, "tpu") == "out_in"
    assert "xla_disable_hlo_passes" in compiler_options("cpu")
    with pytest.raises(ValueError, match="'npu'"), target_platform("npu"):
        pass
    assert current_platform() == jax.default_backend()
