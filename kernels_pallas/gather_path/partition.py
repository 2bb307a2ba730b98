"""Lets each device of a mesh move the nodes of its own heads and batch rows."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from specjax.typing import Array, Int


def partitioned(
    function: Callable[..., tuple[Array, ...]],
    caches: Sequence[Array],
    start: Int[Array, " B"],
    path: Int[Array, "B D"],
) -> tuple[Array, ...]:
    """Calls a kernel so that XLA's partitioner can split it over heads and batch.

    A kernel is opaque to the partitioner: left alone, it would gather whole caches.

    Args:
      function: (caches, start, path) -> caches.
      caches: arrays [B, K, S, M] or [B, K, S].
      start: slot of node 0.
      path: nodes.

    Returns:
      What the function returns.
    """
    n = len(caches)

    def call(*args: Array) -> tuple[Array, ...]:
        return function(args[:n], args[n], args[n + 1])

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        spec = (*arguments[0].sharding.spec, None, None)[:2]
        split = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
        kept = tuple(split(*spec) for _ in range(n))
        return mesh, call, kept, (*kept, split(spec[0]), split(spec[0], None))

    # Factors by size: axes of one name must have one size. Slots and widths stay whole.
    names = lambda x: zip("ksm"[: x.ndim - 1], x.shape[1:], strict=True)
    axes = [["b", *(f"{name}{size}" for name, size in names(x))] for x in caches]
    whole = dict.fromkeys(name for axis in axes for name in axis[2:])
    operands = ", ".join(" ".join(axis) for axis in axes)
    call = custom_partitioning(call)
    call.def_partition(
        partition,
        sharding_rule=f"{operands}, b, b d -> {operands}",
        need_replication_factors=(*whole, "d"),
    )
    return tuple(jax.tree.leaves(call(*caches, start, path)))
