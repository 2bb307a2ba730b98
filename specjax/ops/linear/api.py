"""Chooses how few activation rows are multiplied with a large weight."""

from typing import Literal

import jax.numpy as jnp

from specjax.ops.linear.quantized import QuantizedKernel
from specjax.ops.linear.reference import linear_reference
from specjax.ops.linear.row_invariant import linear_row_invariant
from specjax.ops.linear.xla_cpu import gemv_rows_bf16
from specjax.ops.linear.xla_cpu_quantized import quantized_rows
from specjax.ops.linear.xla_quantized import quantized_product
from specjax.ops.platform import current_platform, is_row_invariant
from specjax.typing import Array, Float

#: How a kernel is stored: ``in_out`` is [in, out], ``out_in`` is [out, in].
KernelLayout = Literal["in_out", "out_in"]

#: A kernel as an array or as small integers with scales.
Kernel = Float[Array, "A C"] | QuantizedKernel


def linear(
    x: Float[Array, "*rows I"],
    kernel: Kernel,
    *,
    layout: KernelLayout = "in_out",
) -> Float[Array, "*rows O"]:
    """Multiplies activation rows by a kernel, summing in float32.

    Args:
      x: activations of any leading shape.
      kernel: ``[I, O]`` with layout ``in_out``, ``[O, I]`` with ``out_in``; quantised
        ones are ``out_in``.
      layout: how the kernel is stored.

    Returns:
      The product, float32. A quantised kernel's is that of its dequantised weights;
      TPUs and GPUs may round the activations to bfloat16.

    Raises:
      ValueError: the widths do not agree, or the layout is not known or not that of a
        quantised kernel.
    """
    return linear_group(x, (kernel,), layout=layout)[0]


def linear_group(
    x: Float[Array, "*rows I"],
    kernels: tuple[Kernel, ...],
    *,
    layout: KernelLayout = "in_out",
) -> tuple[Float[Array, "*rows O"], ...]:
    """Multiplies the same activation rows by several kernels.

    Args:
      x: activations of any leading shape.
      kernels: as in ``linear``; their output widths may differ.
      layout: how all of them are stored.

    Returns:
      The products, float32.

    Raises:
      ValueError: see ``linear``; or some are quantised and others are not.
    """
    if layout not in ("in_out", "out_in"):
        raise ValueError(f"{layout=} is not known; use 'in_out' or 'out_in'.")
    for kernel in kernels:
        inner = kernel.shape[0 if layout == "in_out" else 1]
        if x.shape[-1] != inner:
            raise ValueError(
                f"x has width {x.shape[-1]}, the kernel {kernel.shape} ({layout}) "
                f"takes {inner}."
            )
    rows = x.size // x.shape[-1]
    flat = x.reshape(rows, x.shape[-1])
    quantized = tuple(k for k in kernels if isinstance(k, QuantizedKernel))
    arrays = tuple(k for k in kernels if not isinstance(k, QuantizedKernel))
    if quantized:
        _check_quantized(layout, some_are_not=bool(arrays))
        products = _quantized(flat, quantized)
    elif is_row_invariant():
        products = tuple(linear_row_invariant(flat, k, layout=layout) for k in arrays)
    elif (
        current_platform() == "cpu"
        and rows == 1
        and layout == "out_in"
        and all(k.dtype == jnp.bfloat16 for k in arrays)
    ):
        products = gemv_rows_bf16(flat[0], arrays)
    else:
        products = tuple(linear_reference(flat, k, layout=layout) for k in arrays)
    return tuple(y.reshape(*x.shape[:-1], -1) for y in products)


def _check_quantized(layout: KernelLayout, *, some_are_not: bool) -> None:
    """Checks a group that has quantised kernels."""
    if layout != "out_in":
        raise ValueError(f"{layout=}: quantised kernels are [out, in]; use 'out_in'.")
    if some_are_not:
        raise ValueError(
            "some kernels of the group are quantised and others are not; multiply by "
            "them in two groups."
        )


def _quantized(
    x: Float[Array, "N I"], kernels: tuple[QuantizedKernel, ...]
) -> tuple[Float[Array, "N O"], ...]:
    """Multiplies rows by quantised kernels."""
    invariant = is_row_invariant()
    if current_platform() == "cpu":
        # Alone, a row meets the same sums whatever the number of rows.
        alike = len({(k.bits, k.group) for k in kernels}) == 1
        groups = (kernels,) if alike else tuple((k,) for k in kernels)
        made = (quantized_rows(x, g, together=not invariant) for g in groups)
        return tuple(y for products in made for y in products)
    if invariant:
        return tuple(linear_row_invariant(x, k, layout="out_in") for k in kernels)
    return tuple(quantized_product(x, k) for k in kernels)


def preferred_layout(dtype: jnp.dtype, platform: str | None = None) -> KernelLayout:
    """Returns the kernel layout that is fastest for a platform and dtype.

    XLA:CPU packs an ``[out, in]`` float32 kernel anew on each product of two rows
    or more, which doubles the time of a pass; ``[in, out]`` is used in place. In
    bfloat16 both cost the same there, and only ``[out, in]`` has a fast one-row
    product. Compiled for TPUs, ``in_out`` query, key and value kernels are laid out
    anew on each call of a decode program (384 MiB of copies a v5e chip for a model of
    Llama-3-8B's shape on four); ``out_in`` kernels are not.

    Args:
      dtype: the kernels' dtype.
      platform: ``cpu``, ``gpu`` or ``tpu``; the current one when None.

    Returns:
      ``in_out`` or ``out_in``.
    """
    platform = platform or current_platform()
    if platform == "tpu":
        return "out_in"
    bfloat16 = jnp.dtype(dtype) == jnp.bfloat16
    return "out_in" if platform == "cpu" and bfloat16 else "in_out"
