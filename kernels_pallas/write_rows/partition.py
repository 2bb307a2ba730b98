"""Lets each device of a mesh write the rows of its own heads and batch rows."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from specjax.typing import Array


def partitioned(
    function: Callable[..., tuple[Array, Array]], *args: Array
) -> tuple[Array, Array]:
    """Calls a kernel so that XLA's partitioner can split it over heads and batch.

    A kernel is opaque to the partitioner: left alone, it would gather whole caches.
    Where rows are named (``rows``), the batch stays whole.

    Args:
      function: of the same arguments as ``kernel_tpu.write_rows``.
      *args: keys and values [B, K, S, M], new ones [R, T, K, M], start [R] and, where
        rows are named, rows [R].

    Returns:
      What the function returns.
    """
    named = len(args) == 6
    row = "r" if named else "b"

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        spec = (*arguments[0].sharding.spec, None, None)[:2]
        batch, heads = (None, spec[1]) if named else spec
        split = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
        cache, new = split(batch, heads), split(batch, None, heads)
        vectors = (split(batch),) * (len(args) - 4)
        return mesh, function, (cache, cache), (cache, cache, new, new, *vectors)

    cache, new = "b k s m", f"{row} t k m"
    vectors = ", ".join([row] * (len(args) - 4))
    call = custom_partitioning(lambda *args: function(*args))
    call.def_partition(
        partition,
        sharding_rule=f"{cache}, {cache}, {new}, {new}, {vectors} -> {cache}, {cache}",
        need_replication_factors=(*("b" if named else ""), "s", "m", *row[:named], "t"),
    )
    keys, values = jax.tree.leaves(call(*args))
    return keys, values
