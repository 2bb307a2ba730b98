"""Kernels in int8 and int4: rounding, packing, and products against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.ops.linear import (
    QuantizedKernel,
    check_group,
    dequantize_kernel,
    linear,
    linear_group,
    linear_reference,
    quantize_kernel,
)
from specjax.ops.platform import row_invariant, target_platform

FORMS = [(8, None), (8, 24), (8, 1), (4, None), (4, 24), (4, 2)]
each_form = pytest.mark.parametrize(("bits", "group"), FORMS)


def _kernel(n_out, n_in, seed=0):
    rng = np.random.default_rng([seed, n_out, n_in])
    return rng.normal(size=(n_out, n_in)).astype(np.float32)


def _rows(n_rows, n_in, seed=1):
    rng = np.random.default_rng([seed, n_rows, n_in])
    return jnp.asarray(rng.normal(size=(n_rows, n_in)), jnp.float32)


def _exact(x, kernel):
    weights = np.asarray(dequantize_kernel(kernel), np.float64)
    return np.asarray(x, np.float64) @ weights.T


def _unpacked(kernel):
    """The weights, written out as the docstring of ``QuantizedKernel`` says."""
    values, scales = np.asarray(kernel.values), np.asarray(kernel.scales)
    (n_out, n_in), size = kernel.shape, kernel.group
    found = np.zeros((n_out, n_in))
    for o in range(n_out):
        for i in range(n_in):
            g, j = divmod(i, size)
            if kernel.bits == 8:
                value = int(values[o, i])
            else:
                byte = int(values[o, g * size // 2 + j % (size // 2)])
                value = (byte >> 4 if j >= size // 2 else byte & 15) - 8
            found[o, i] = value * scales[o, g]
    return found


@each_form
def test_a_weight_is_within_half_a_scale(bits, group):
    weights = _kernel(13, 48)
    weights[3] = 0.0  # a group without a scale of its own
    kernel = quantize_kernel(jnp.asarray(weights), bits=bits, group=group)
    assert kernel.shape == (13, 48) and kernel.bits == bits
    assert kernel.group == (48 if group is None else group)
    back = np.asarray(dequantize_kernel(kernel))
    np.testing.assert_allclose(back, _unpacked(kernel), rtol=1e-6)
    error = np.abs(back - weights).reshape(13, -1, kernel.group)
    scales = np.asarray(kernel.scales)[:, :, None]
    assert (error <= scales * (0.5 + 1e-5)).all()
    # The bound has teeth: groups reach it, and scales are no larger than they must be.
    if kernel.group > 2:
        assert (error > scales * 0.4).any()
    largest = np.abs(weights).reshape(error.shape).max(axis=2)[:3]
    np.testing.assert_allclose(
        scales[:3, :, 0], largest / (2 ** (bits - 1) - 0.5), rtol=1e-6
    )
    assert not back[3].any()


@each_form
def test_bytes_in_memory(bits, group):
    kernel = quantize_kernel(jnp.asarray(_kernel(64, 48)), bits=bits, group=group)
    values, scales = kernel
    assert values.nbytes == 64 * 48 * bits // 8
    assert values.on_device_size_in_bytes() == values.nbytes  # nothing is padded
    assert scales.nbytes == 4 * 64 * (48 // kernel.group)


@each_form
@pytest.mark.parametrize("n_out", [1, 13, 64])
def test_product_is_that_of_the_dequantised_weights(bits, group, n_out):
    kernel = quantize_kernel(jnp.asarray(_kernel(n_out, 48)), bits=bits, group=group)
    for n_rows in (1, 3, 9):
        x = _rows(n_rows, 48)
        exact = _exact(x, kernel)
        for invariant in (False, True):
            if invariant and n_rows > 3:
                continue
            with row_invariant(invariant):
                out = jax.jit(lambda x, k: linear(x, k, layout="out_in"))(x, kernel)
            assert out.dtype == jnp.float32 and out.shape == (n_rows, n_out)
            np.testing.assert_allclose(out, exact, atol=2e-5)
        reference = linear_reference(x, kernel, layout="out_in")
        np.testing.assert_allclose(reference, exact, atol=2e-5)
        if n_out > 1:
            for wrong in _wrong(kernel):
                assert not np.allclose(out, _exact(x, wrong), atol=2e-3)


def _wrong(kernel):
    """What mistakes would read: nibbles swapped, scales of others or none."""
    values, scales = kernel
    found = [QuantizedKernel(values, jnp.ones_like(scales))]
    found.append(QuantizedKernel(values, jnp.roll(scales, 1, axis=0)))
    if scales.shape[1] > 1:
        found.append(QuantizedKernel(values, jnp.roll(scales, 1, axis=1)))
    if kernel.bits == 4:
        found.append(QuantizedKernel((values >> 4) | (values << 4), scales))
    return found


def test_the_cpu_makes_no_dequantised_copy():
    kernel = quantize_kernel(jnp.asarray(_kernel(64, 48)), bits=4, group=24)
    with target_platform("cpu"):
        for n_rows in (1, 8):
            product = lambda x, k: linear(x, k, layout="out_in")
            jaxpr = jax.make_jaxpr(product)(_rows(n_rows, 48), kernel)
            # The path that is meant: a loop of sums, no product of matrices.
            assert "dot_general" not in str(jaxpr) and "scan" in str(jaxpr)
            compiled = jax.jit(product).lower(_rows(n_rows, 48), kernel).compile()
            assert compiled.memory_analysis().temp_size_in_bytes < 64 * 48 * 4


@each_form
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_product_for_accelerators(bits, group, platform):
    kernel = quantize_kernel(jnp.asarray(_kernel(64, 48)), bits=bits, group=group)
    x = _rows(9, 48)
    for invariant in (False, True):
        with target_platform(platform), row_invariant(invariant):
            out = linear(x, kernel, layout="out_in")
        # Activations may be rounded to bfloat16, 2**-9 of each of 48 products.
        np.testing.assert_allclose(out, _exact(x, kernel), atol=0.1)
        for wrong in _wrong(kernel):
            assert not np.allclose(out, _exact(x, wrong), atol=0.3)


@each_form
def test_a_group_is_each_product(bits, group):
    kernels = tuple(
        quantize_kernel(jnp.asarray(_kernel(n, 48)), bits=bits, group=group)
        for n in (24, 13)
    )
    mixed = (kernels[0], quantize_kernel(jnp.asarray(_kernel(9, 48)), bits=8))
    for n_rows in (1, 4):
        x = _rows(n_rows, 48)
        for them in (kernels, mixed):
            for together, k in zip(
                linear_group(x, them, layout="out_in"), them, strict=True
            ):
                np.testing.assert_allclose(together, _exact(x, k), atol=2e-5)


@each_form
def test_rows_are_invariant(bits, group):
    kernel = quantize_kernel(jnp.asarray(_kernel(130, 48)), bits=bits, group=group)
    x = _rows(11, 48)
    product = jax.jit(lambda x, k: linear(x, k, layout="out_in"))
    with row_invariant():
        alone = np.concatenate([product(x[i : i + 1], kernel) for i in range(11)])
        for n in (2, 3, 11):
            together = np.asarray(product(x[11 - n :], kernel))
            assert together.tobytes() == alone[11 - n :].tobytes()


def test_leading_shape_is_kept():
    kernel = quantize_kernel(jnp.asarray(_kernel(24, 48)), bits=8)
    for shape in ((48,), (2, 3, 48), (1, 1, 48)):
        out = linear(jnp.ones(shape), kernel, layout="out_in")
        assert out.shape == (*shape[:-1], 24)


def test_unfit_arguments_say_what_would_be_right():
    weights = jnp.asarray(_kernel(6, 48))
    with pytest.raises(ValueError, match=r"group=7 does not divide.*such as 6, or No"):
        quantize_kernel(weights, bits=8, group=7)
    with pytest.raises(ValueError, match="a group of 3 must be even"):
        quantize_kernel(weights, bits=4, group=3)
    with pytest.raises(ValueError, match="bits=2 is not supported; use one of"):
        quantize_kernel(weights, bits=2)
    with pytest.raises(ValueError, match="group=0 must be at least 1"):
        check_group(8, 0, 48, "width")
    kernel = quantize_kernel(weights, bits=8)
    with pytest.raises(ValueError, match="use 'out_in'"):
        linear(jnp.ones((2, 6)), kernel)
    with pytest.raises(ValueError, match=r"width 5.*\(6, 48\) \(out_in\) takes 48"):
        linear(jnp.ones((2, 5)), kernel, layout="out_in")
    with pytest.raises(ValueError, match="in two groups"):
        linear_group(jnp.ones((2, 48)), (kernel, weights), layout="out_in")
