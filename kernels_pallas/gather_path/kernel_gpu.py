"""Compaction of accepted tree nodes on GPU: all layers in one launch.

A block of the grid has one batch row of one array. The copy engine (TMA) brings a
node's slot, all heads at once, to shared memory and puts it at its place; no thread
touches a number, so any dtype goes through bit for bit. What is not moved is copied
onto itself.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.typing import Array, Int

# The copy engine's units: of a row in memory, and of a place in shared memory.
_ROW_BYTES = 16
_PLACE_BYTES = 128

# Scales of a head that are held in registers at once.
_MOST_SCALES = 64

# A copy has at most this many heads.
_MOST_HEADS = 256

# Shared memory for nodes; a GB10 block may have 99 KiB, and smaller blocks share a
# core.
_SHARED_BYTES = 48 * 2**10


def supports(caches: Sequence[Any], *, n_nodes: int, depth: int) -> str | None:
    """Says why the kernel can't take such caches.

    Args:
      caches: arrays [B, K, S, M] or, of scales, [B, K, S]; shapes and dtypes are looked
        at.
      n_nodes: of the pass.
      depth: longest path, D.

    Returns:
      None if it can, else the reason.
    """
    if depth > n_nodes:
        return f"a path of {depth} nodes is longer than the {n_nodes} of the pass"
    for cache in caches:
        if len(cache.shape) == 3:
            if depth > _MOST_SCALES:
                return f"a path of {depth} scales is longer than {_MOST_SCALES}"
            continue
        _, heads, _, width = cache.shape
        if width * jnp.dtype(cache.dtype).itemsize % _ROW_BYTES:
            return f"{width} x {cache.dtype} is no multiple of {_ROW_BYTES} bytes"
        if heads > _MOST_HEADS:
            return f"{heads} heads are more than the {_MOST_HEADS} of a copy"
    needed = sum(_node_bytes(kind) for kind in _kinds(caches))
    if needed > _SHARED_BYTES:
        return f"a node of {needed} bytes exceeds {_SHARED_BYTES} of shared memory"
    return None


def gather_path(
    caches: Sequence[Array],
    start: Int[Array, " B"],
    path: Int[Array, "B D"],
    n_nodes: int,
    *,
    interpret: Any = False,
) -> tuple[Array, ...]:
    """Moves slot ``start + path[:, d]`` to slot ``start + d``, in place.

    Args:
      caches: arrays [B, K, S, M] or [B, K, S]; donate them, else they are copied.
      start: slot of node 0 of each row; the nodes are inside the array.
      path: increasing nodes from the top down, -1 after the end.
      n_nodes: of the pass.
      interpret: as in ``pallas_call``.

    Returns:
      The arrays; all other slots are as they were.
    """
    del n_nodes
    n = len(caches)
    batch, depth = path.shape
    kinds = _kinds(caches)
    most = _SHARED_BYTES // max(1, sum(_node_bytes(kind) for kind in kinds))
    chunk = max(x for x in range(1, depth + 1) if depth % x == 0 and x <= most)
    given = start.astype(jnp.int32), path.astype(jnp.int32).reshape(-1)
    # References, since what a kernel is given as arrays it may not write.
    launch: Any = pl.kernel(
        functools.partial(
            _kernel, kinds=tuple(_kind(x) for x in caches), depth=depth, chunk=chunk
        ),
        mesh=plgpu.Mesh(grid=(n, batch), grid_names=("array", "row")),
        interpret=interpret,
        name="gather_path",
    )
    return pl.run_state(lambda caches: launch(*given, *caches))(tuple(caches))


def _kernel(
    start_ref: Any,
    path_ref: Any,
    *caches: Any,
    kinds: tuple["_Kind | None", ...],
    depth: int,
    chunk: int,
) -> None:
    """Moves the nodes of one batch row in one array."""
    array, b = lax.axis_index("array"), lax.axis_index("row")
    start = start_ref[b]
    node = lambda d: path_ref[b * depth + d]
    count = lambda d, total: total + (node(d) > d).astype(jnp.int32)
    n_moves = lax.fori_loop(0, depth, count, jnp.int32(0))

    def move(place, arrived, cache):
        heads = cache.shape[1]

        # A node is never above its depth, so what a chunk writes no later one reads.
        @pl.loop(0, depth // chunk)
        def _(c):
            @pl.loop(0, chunk)
            def _(i):
                d = c * chunk + i
                source = start + jnp.maximum(node(d), d)
                inside = place.at[i, pl.ds(0, heads)]
                plgpu.copy_gmem_to_smem(cache.at[b, :, source], inside, arrived)

            plgpu.barrier_wait(arrived)
            plgpu.commit_smem()  # no copy out before all have come in

            @pl.loop(0, chunk)
            def _(i):
                inside = place.at[i, pl.ds(0, heads)]
                target = cache.at[b, :, start + c * chunk + i]
                plgpu.copy_smem_to_gmem(inside, target)

            plgpu.wait_smem_to_gmem(0)

    for i, kind in enumerate(kinds):

        @pl.when((array == i) & (n_moves > 0))
        def _(i=i, kind=kind):
            if kind is None:
                _move_scales(caches[i], b, start, node, depth)
                return
            pl.run_scoped(
                functools.partial(move, cache=caches[i]),
                plgpu.SMEM((chunk, *_place(kind)), kind[2]),
                plgpu.Barrier(num_arrivals=chunk),
            )


def _move_scales(cache: Any, b: Array, start: Array, node: Any, depth: int) -> None:
    """Moves the slots of one batch row of [B, K, S], too narrow for the copy engine."""
    sources = [start + jnp.maximum(node(d), d) for d in range(depth)]

    @pl.loop(0, cache.shape[1])
    def _(head):
        # All are read before any is written: the reads wait for memory together.
        found = [cache[b, head, source] for source in sources]
        for d, value in enumerate(found):
            cache[b, head, start + d] = value


_Kind = tuple[int, int, Any]


def _kind(cache: Any) -> _Kind | None:
    """Returns heads, width and dtype; None for scales."""
    if len(cache.shape) == 3:
        return None
    return cache.shape[1], cache.shape[3], jnp.dtype(cache.dtype)


def _kinds(caches: Sequence[Any]) -> list[_Kind]:
    return list(dict.fromkeys(kind for x in caches if (kind := _kind(x))))


def _place(kind: _Kind) -> tuple[int, int]:
    """Returns the shape of a node in shared memory, heads up to whole places."""
    heads, width, dtype = kind
    while heads * width * dtype.itemsize % _PLACE_BYTES:
        heads += 1
    return heads, width


def _node_bytes(kind: _Kind) -> int:
    heads, width = _place(kind)
    return heads * width * kind[2].itemsize
