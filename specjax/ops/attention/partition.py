"""Lets each device of a mesh run an attention kernel on its own heads and rows."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from specjax.typing import Array, Float, Int

# Axes of the kernel's named arguments; ``r`` are the rows of the pass.
_AXES = {
    "rows": "r",
    "mask": "r t u",
    "offsets": "r t",
    "key_scale": "b k s",
    "value_scale": "b k s",
}


def partitioned(
    kernel: Callable[..., Array],
    q: Float[Array, "R T H M"],
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    length: Int[Array, " R"],
    **named: Array,
) -> Float[Array, "R T H M"]:
    """Calls a kernel so that XLA's partitioner can split it over heads and batch.

    A kernel is opaque to the partitioner: left alone, it would gather whole caches.
    Where rows are named (``rows``), the batch stays whole.

    Args:
      kernel: of the arguments of ``kernel_tpu.tree_attention``, static ones bound.
      q: queries.
      keys: cache, sharded over batch and heads at most, as values and scales are.
      values: likewise.
      length: committed tokens of each row.
      **named: rows, mask, offsets, key_scale and value_scale, those there are.

    Returns:
      What the kernel returns.
    """
    n_rows, n_new, n_heads, width = q.shape
    n_kv = keys.shape[1]
    row = "r" if "rows" in named else "b"
    axes = ["r t k g m", "b k s m", "b k s m", "r", *(_AXES[name] for name in named)]
    axes = [x.replace("r", row) for x in axes]

    def local(*args: Array) -> Array:
        """Runs on one device's part, its queries [R, T, K, G, M]."""
        grouped, *cache = args[:4]
        flat = grouped.reshape(*grouped.shape[:2], -1, width)
        rest = dict(zip(named, args[4:], strict=True))
        return kernel(flat, *cache, **rest).reshape(grouped.shape)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        batch, heads = (*arguments[1].sharding.spec, None, None)[:2]
        split = {"k": heads, row: None if row == "r" else batch}
        place = lambda names: NamedSharding(
            mesh, PartitionSpec(*(split.get(name) for name in names.split()))
        )
        return mesh, local, place(axes[0]), tuple(map(place, axes))

    whole = ["t", "g", "m", "s"] + ["b", "r"] * (row == "r") + ["u"] * ("mask" in named)
    # Factors are told in the order in which the rule names them.
    order = "".join(axes)
    call = custom_partitioning(local)
    call.def_partition(
        partition,
        sharding_rule=f"{', '.join(axes)} -> {axes[0]}",
        need_replication_factors=tuple(sorted(whole, key=order.index)),
    )
    grouped = q.reshape(n_rows, n_new, n_kv, n_heads // n_kv, width)
    (out,) = jax.tree.leaves(call(grouped, keys, values, length, *named.values()))
    return out.reshape(q.shape)
