"""Chooses the implementation of cached attention."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.ops.attention.partition import partitioned
from specjax.ops.attention.xla import KV_BLOCK, blocked_attention
from specjax.ops.choose import Implementation, choose
from specjax.ops.platform import is_row_invariant
from specjax.trees import PassLayout
from specjax.typing import Array, Float, Int

__all__ = ["KV_BLOCK", "cached_attention"]

# Query rows of a key/value head in one product, when rows must not depend on their
# number: every product then has this one shape.
_INVARIANT_ROWS = 32

# Compute capability by a part of the device's name.
_CAPABILITIES = {"H100": "9.0", "H200": "9.0", "GB10": "12.1"}


def cached_attention(
    q: Float[Array, "R T H M"],
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    length: Int[Array, " R"],
    *,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    layout: PassLayout | None = None,
    row: Int[Array, ""] | None = None,
    soft_cap: float | None = None,
    key_scale: Float[Array, "B K S"] | None = None,
    value_scale: Float[Array, "B K S"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "R T H M"]:
    """Attends from T new rows to the cache, touching only its live part.

    The definition is :func:`cached_attention_reference`. Keys are visited in
    blocks of ``KV_BLOCK`` slots (a GPU kernel's are smaller) anchored at position 0,
    so that a row's result depends neither on the other rows nor on how much of the
    cache lies beyond it. A kernel's result does not depend on T either; XLA's form only
    when traced inside ``row_invariant``. On a mesh each device attends with its own
    heads; there TPUs use XLA's form.

    Args:
      q: queries, rotated.
      keys: cache after this pass's rows were written at [length, length + T);
        what lies beyond is never used, NaN included.
      values: as keys.
      length: committed tokens of each addressed row before this pass.
      scale: factor on the scores.
      window: sliding window in tokens, or None.
      sinks: with a window, first tokens of the text that are seen besides it.
      layout: of a pass over a tree: which of the new rows each new row sees, and how
        far behind ``length`` it stands. None: a chain, each one further than the last.
      row: which batch row of the cache the queries belong to (then R is 1);
        None when the queries are the whole batch (R is B).
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``; None: they stay
        as they are.
      key_scale: of a quantised cache, the factor of each slot and head, float32;
        None: 1.
      value_scale: likewise, of its values.
      implementation: ``xla``, ``pallas_tpu`` or ``pallas_gpu``; None: the platform's
        kernel if it can take these arrays, else ``xla``.

    Returns:
      Attention output, float32.

    Raises:
      ValueError: shapes do not agree, S is no multiple of the block, ``soft_cap`` is
        not positive, or the implementation that was named can't take the arrays.
    """
    _check(q, keys, values, row, key_scale, value_scale)
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"{soft_cap=} is not positive; None leaves scores alone.")
    kind: dict[str, Any] = dict(scale=scale, window=window, soft_cap=soft_cap)
    kind |= dict(sinks=sinks if window is not None else 0)
    scales = dict(key_scale=key_scale, value_scale=value_scale)

    def unsupported(kernel: Implementation) -> str | None:
        if (key_scale is None) != (value_scale is None):
            return "keys or values alone have scales"
        module, config = _kernel(kernel)
        if kernel == "pallas_tpu":
            if _n_devices() > 1:
                return (
                    "libtpu has no custom partitioning, so a program of several "
                    "devices can't have the kernel; set a mesh of one device"
                )
            config["mask"] = None if layout is None else layout.mask
        return module.supports(q, keys, key_scale=key_scale, **config)

    chosen = choose(implementation, unsupported)
    if chosen == "xla":
        return blocked_attention(
            q,
            keys,
            values,
            length,
            **kind,
            **scales,
            layout=layout,
            row=row,
            tile_rows=_INVARIANT_ROWS if is_row_invariant() else None,
        )
    n_rows, n_new = q.shape[:2]
    arrays = {**scales, "rows": None if row is None else row[None]}
    if layout is not None:
        square = (n_rows, n_new, n_new)
        arrays["mask"] = jnp.broadcast_to(jnp.asarray(layout.mask), square)
        arrays["offsets"] = jnp.broadcast_to(jnp.asarray(layout.offsets), square[:2])
    module, config = _kernel(chosen)
    return partitioned(
        lambda *args, **named: module.tree_attention(*args, **named, **kind, **config),
        q,
        keys,
        values,
        length,
        **{name: x for name, x in arrays.items() if x is not None},
    )


def _check(
    q: Array,
    keys: Array,
    values: Array,
    row: Array | None,
    key_scale: Array | None,
    value_scale: Array | None,
) -> None:
    """Refuses arrays whose shapes do not agree."""
    n_rows, _, n_heads, width = q.shape
    batch, n_kv, slots, kv_width = keys.shape
    if keys.shape != values.shape or kv_width != width:
        raise ValueError(f"{q.shape=}, {keys.shape=} and {values.shape=} do not agree.")
    if n_heads % n_kv:
        raise ValueError(f"{n_heads=} is no multiple of {n_kv=}.")
    if slots % KV_BLOCK:
        raise ValueError(f"{slots=} is no multiple of {KV_BLOCK=}.")
    if n_rows != (batch if row is None else 1):
        raise ValueError(
            f"{n_rows=} queries address a cache of {batch} rows; pass row= for one."
        )
    for name, factors in (("key_scale", key_scale), ("value_scale", value_scale)):
        if factors is not None and factors.shape != (batch, n_kv, slots):
            raise ValueError(
                f"{name} has the shape {factors.shape}; it must be {keys.shape[:3]}, a "
                "factor for each slot and head."
            )


def _kernel(implementation: Implementation) -> tuple[Any, dict[str, Any]]:
    """Imports a kernel's module; nothing of Pallas is looked for before.

    Returns:
      The module, and its own static arguments.
    """
    if implementation == "pallas_tpu":
        from kernels_pallas.tree_attention import kernel_tpu

        return kernel_tpu, {}
    from kernels_pallas.tree_attention import kernel_gpu

    return kernel_gpu, {"arch": kernel_gpu.device_arch(_gpu_capability())}


def _n_devices() -> int:
    """Returns how many devices the program may be for: the mesh's, or all TPUs."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh.size
    return jax.device_count() if jax.default_backend() == "tpu" else 1


def _gpu_capability() -> str:
    """Returns the compute capability of the GPU that is compiled for, 0.0 if unknown.

    Ahead of time there is no device to ask, but the mesh that is compiled under says
    what kind its devices are.
    """
    if jax.default_backend() == "gpu":
        return str(jax.devices()[0].compute_capability)
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = "" if device is None else device.device_kind
    return next((at for name, at in _CAPABILITIES.items() if name in kind), "0.0")
