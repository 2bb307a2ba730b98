"""Chooses how the kept nodes of a tree pass move to the front."""

import functools
from typing import Any

import jax

from specjax.ops.choose import Implementation, choose
from specjax.ops.gather_path.xla import gather_path_xla
from specjax.typing import Array, Int


def gather_path[Caches](
    caches: Caches,
    start: Int[Array, " B"],
    path: Int[Array, "B D"],
    n_nodes: int,
    *,
    implementation: Implementation | None = None,
) -> Caches:
    """Moves the kept nodes of a pass over a tree to where a chain's would stand.

    What stands in slot ``start + path[b, d]`` goes to slot ``start + d``, of every
    array, in place where the arrays are donated. The definition is
    ``gather_path_reference``. A kernel moves all arrays in one launch, and on a mesh
    each device moves its own heads and batch rows.

    Args:
      caches: any tree of arrays [B, K, S, M] (keys, values) and [B, K, S] (scales) of
        any dtype; values are copied bit for bit.
      start: slot of node 0 of each row, int32; ``start + n_nodes`` is within S.
      path: nodes kept, from the top down: increasing, hence ``path[b, d] >= d``; -1
        after the end. What stands in the slots of -1 entries afterwards is of no
        interest; kernels leave it as it was.
      n_nodes: of the pass, static; at least D.
      implementation: ``xla``, ``pallas_tpu`` or ``pallas_gpu``; None: the platform's
        kernel if it can take these arrays, else ``xla``.

    Returns:
      The arrays in the same tree; slots outside ``[start, start + D)`` as they were.

    Raises:
      ValueError: shapes do not agree, or the implementation that was named can't take
        them.
    """
    leaves, tree = jax.tree.flatten(caches)
    batch, depth = path.shape
    for x in leaves:
        if x.ndim not in (3, 4) or x.shape[0] != batch or x.shape[2] < n_nodes:
            raise ValueError(
                f"A cache is [B, K, S, M] or [B, K, S], of {batch} rows and at least "
                f"{n_nodes} slots; this one is {x.shape}."
            )
    if start.shape != (batch,) or depth > n_nodes:
        raise ValueError(f"{start.shape=}, {path.shape=} and {n_nodes=} do not agree.")
    if not leaves or not depth:
        return caches

    def unsupported(kernel: Implementation) -> str | None:
        return _kernel(kernel).supports(leaves, n_nodes=n_nodes, depth=depth)

    chosen = choose(implementation, unsupported)
    if chosen == "xla":
        moved = gather_path_xla(leaves, start, path, n_nodes)
    else:
        from kernels_pallas.gather_path.partition import partitioned

        kernel = functools.partial(_kernel(chosen).gather_path, n_nodes=n_nodes)
        moved = partitioned(kernel, leaves, start, path)
    return jax.tree.unflatten(tree, moved)


def _kernel(implementation: Implementation) -> Any:
    """Imports a kernel's module; nothing of Pallas is looked for before."""
    if implementation == "pallas_tpu":
        from kernels_pallas.gather_path import kernel_tpu

        return kernel_tpu
    from kernels_pallas.gather_path import kernel_gpu

    return kernel_gpu
