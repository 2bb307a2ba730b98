"""Chooses how few activation rows are multiplied with a large weight."""

from typing import Literal

import jax.numpy as jnp

from specjax.ops.linear.reference import linear_reference
from specjax.ops.linear.row_invariant import linear_row_invariant
from specjax.ops.linear.xla_cpu import gemv_rows_bf16
from specjax.ops.platform import current_platform, is_row_invariant
from specjax.typing import Array, Float

#: How a kernel is stored: ``in_out`` is [in, out], ``out_in`` is [out, in].
KernelLayout = Literal["in_out", "out_in"]


def linear(
    x: Float[Array, "*rows I"],
    kernel: Float[Array, "A C"],
    *,
    layout: KernelLayout = "in_out",
) -> Float[Array, "*rows O"]:
    """Multiplies activation rows by a kernel, summing in float32.

    Args:
      x: activations of any leading shape.
      kernel: ``[I, O]`` with layout ``in_out``, ``[O, I]`` with ``out_in``.
      layout: how the kernel is stored.

    Returns:
      The product, float32.

    Raises:
      ValueError: the widths do not agree, or the layout is not known.
    """
    if layout not in ("in_out", "out_in"):
        raise ValueError(f"{layout=} is not known; use 'in_out' or 'out_in'.")
    inner = kernel.shape[0 if layout == "in_out" else 1]
    if x.shape[-1] != inner:
        raise ValueError(
            f"x has width {x.shape[-1]}, the kernel {kernel.shape} ({layout}) takes "
            f"{inner}."
        )
    rows = x.size // x.shape[-1]
    if is_row_invariant():
        flat = linear_row_invariant(x.reshape(rows, inner), kernel, layout=layout)
        return flat.reshape(*x.shape[:-1], -1)
    if (
        current_platform() == "cpu"
        and kernel.dtype == jnp.bfloat16
        and layout == "out_in"
        and rows == 1
    ):
        return gemv_rows_bf16(x.reshape(-1), kernel).reshape(*x.shape[:-1], -1)
    return linear_reference(x, kernel, layout=layout)


def preferred_layout(dtype: jnp.dtype, platform: str | None = None) -> KernelLayout:
    """Returns the kernel layout that is fastest for a platform and dtype.

    XLA:CPU packs an ``[out, in]`` float32 kernel anew on each product of two rows
    or more, which doubles the time of a pass; ``[in, out]`` is used in place. In
    bfloat16 both cost the same there, and only ``[out, in]`` has a fast one-row
    product.

    Args:
      dtype: the kernels' dtype.
      platform: ``cpu``, ``gpu`` or ``tpu``; the current one when None.

    Returns:
      ``in_out`` or ``out_in``.
    """
    platform = platform or current_platform()
    if platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16:
        return "out_in"
    return "in_out"
