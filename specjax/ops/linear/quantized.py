"""Kernels in int8 and int4, with a scale for each group of weights."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import qwix

from specjax.typing import Array, Float, Int

#: Widths a weight can have.
BITS = (4, 8)

# What is added to a 4-bit weight before it is packed: nibbles have no sign.
NIBBLE_ZERO = 8


class QuantizedKernel(NamedTuple):
    """A kernel ``[out, in]`` as small integers: weight = integer times scale.

    The weights of a row are cut into groups of equal size; each group has a scale of
    its own. Eight-bit weights lie as they are. Of 4-bit ones two share a byte, on every
    platform: a group of G weights is G/2 bytes; byte j holds weight j in its low nibble
    and weight G/2 + j in its high one, each plus 8. The nibbles of a run of bytes then
    meet runs of activations, as the CPU's loops need it; native ``int4`` arrays are
    packed as well, but put neighbours into a byte.

    Attributes:
      values: int8 ``[O, I]`` for 8 bits, uint8 ``[O, I/2]`` for 4.
      scales: float32 ``[O, I/G]``.
    """

    values: Int[Array, "O C"]
    scales: Float[Array, "O N"]

    @property
    def bits(self) -> int:
        """Bits a weight."""
        return 4 if self.values.dtype == jnp.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of the kernel that this stands for."""
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return self.shape[1] // self.scales.shape[1]


def check_group(bits: int, group: int | None, width: int, what: str) -> int:
    """Checks that a kernel can be cut into groups.

    Args:
      bits: of a weight.
      group: weights that share a scale; None: a whole row.
      width: inputs of the kernel.
      what: the kernel, for messages.

    Returns:
      Weights that share a scale.

    Raises:
      ValueError: the width is no multiple of the group, or a group of 4-bit weights is
        odd.
    """
    if bits not in BITS:
        raise ValueError(f"{bits=} is not supported; use one of {BITS}.")
    if group is not None and group < 1:
        raise ValueError(f"{group=} must be at least 1, in weights, or None for a row.")
    size = width if group is None else group
    if width % size:
        best = max(n for n in range(1, size) if width % n == 0)
        raise ValueError(
            f"{group=} does not divide {what}, {width} inputs; use a divisor, such as "
            f"{best}, or None for a scale a row."
        )
    if bits == 4 and size % 2:
        raise ValueError(
            f"{what}: two 4-bit weights share a byte, so a group of {size} must be "
            "even; use another group or 8 bits."
        )
    return size


@functools.partial(jax.jit, static_argnames=("bits", "group"))
def quantize_kernel(
    kernel: Float[Array, "O I"], *, bits: int, group: int | None = None
) -> QuantizedKernel:
    """Rounds a kernel to integers, symmetrically about zero.

    A group's scale is its largest magnitude over 127.5 or 7.5 (qwix), so that every
    weight lies within half a scale of what it becomes.

    Args:
      kernel: the weights, ``[out, in]``.
      bits: 8 or 4.
      group: weights of a row that share a scale; None: the whole row.

    Returns:
      The quantised kernel.

    Raises:
      ValueError: see ``check_group``.
    """
    size = check_group(bits, group, kernel.shape[1], f"a kernel {kernel.shape}")
    made: Any = qwix.quantize(
        kernel.astype(jnp.float32),
        jnp.int8 if bits == 8 else jnp.int4,
        channelwise_axes=(0,),
        tiled_axes={1: size},
    )
    values, scales = made.qvalue.astype(jnp.int8), made.scale
    return QuantizedKernel(values if bits == 8 else _packed(values, size), scales)


def _packed(values: Int[Array, "O I"], group: int) -> Int[Array, "O H"]:
    """Packs the halves of each group into the nibbles of bytes."""
    n_out, n_in = values.shape
    nibbles = (values + NIBBLE_ZERO).astype(jnp.uint8)
    low, high = jnp.moveaxis(nibbles.reshape(n_out, -1, 2, group // 2), 2, 0)
    return (low | (high << 4)).reshape(n_out, n_in // 2)


def integers(kernel: QuantizedKernel) -> tuple[Int[Array, "O C"], ...]:
    """Returns the weights as integers, in as many arrays as a byte holds weights.

    Args:
      kernel: quantised.

    Returns:
      For 8 bits the values. For 4 bits two int32 arrays ``[O, I/2]``: the first and the
      second half of each group, 8 too large still.
    """
    if kernel.bits == 8:
        return (kernel.values,)
    wide = kernel.values.astype(jnp.int32)
    return wide & 15, wide >> 4


def halves(
    x: Float[Array, "*rows I"], kernel: QuantizedKernel
) -> tuple[Float[Array, "*rows C"], ...]:
    """Sorts activations as ``integers`` sorts the weights they multiply."""
    if kernel.bits == 8:
        return (x,)
    cut = x.reshape(*x.shape[:-1], -1, 2, kernel.group // 2)
    return tuple(cut[..., k, :].reshape(*x.shape[:-1], -1) for k in range(2))


def dequantize_kernel(kernel: QuantizedKernel) -> Float[Array, "O I"]:
    """Returns the weights that a quantised kernel stands for, float32 ``[out, in]``."""
    parts = integers(kernel)
    zero = 0 if kernel.bits == 8 else NIBBLE_ZERO
    n_out, n_groups = kernel.scales.shape
    cut = [(p.astype(jnp.float32) - zero).reshape(n_out, n_groups, -1) for p in parts]
    weights = jnp.concatenate(cut, axis=2) * kernel.scales[:, :, None]
    return weights.reshape(n_out, -1)
