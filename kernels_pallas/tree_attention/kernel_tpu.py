"""Attention of a pass over a length-bounded cache, on TPU (Mosaic).

A step of the grid takes some key/value heads of one row of the pass and some tiles of
its query rows, and walks over the blocks of 256 cache slots that the row sees. Blocks
are brought to VMEM by the kernel itself, one ahead, over the end of a step too: what a
row does not see is neither loaded nor computed, however large the cache.

Blocks are counted from slot 0 and have one size; query rows (new tokens times the query
heads that share a key/value head) are cut into tiles of one shape, each a product of
its own. A block in which a row sees nothing multiplies its sums by exactly one and adds
exact zeros. So a row's bits depend neither on T, nor on its place, nor on its
neighbours.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tree_attention.tiles_tpu import (
    BLOCK,
    LANES,
    MOST_NODES,
    VMEM_BYTES,
    WORD_BITS,
    Pass,
    pass_of,
    sized,
    tiled,
    tree_marks,
    untiled,
)
from specjax.typing import Array, Bool, Float, Int

# Finite, so that a block that a row does not see leaves no NaN: its weights are wiped
# to exactly zero when the row's first visible slot rescales the sums.
_MASKED = -1e30

# Registers hold 8 rows of 32 bits; a transfer moves whole ones.
_ALIGN_BYTES = 32

_QUANTIZED = tuple(map(jnp.dtype, (jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)))
_PLAIN = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16)))


def supports(
    q: Any,
    keys: Any,
    *,
    mask: Any = None,
    key_scale: Any = None,
) -> str | None:
    """Says why the kernel can't take such a pass.

    Args:
      q: queries [R, T, H, M]; shape and dtype are looked at.
      keys: cache [B, K, S, M]; likewise, and values are like it.
      mask: of a tree pass, or None.
      key_scale: scales of a quantised cache, or None; values have them where keys do.

    Returns:
      None if it can, else the reason.
    """
    dtype, slots = jnp.dtype(keys.dtype), keys.shape[2]
    if jnp.dtype(q.dtype) not in _PLAIN:
        return f"queries are {q.dtype}; they must be float32 or bfloat16"
    if dtype not in _PLAIN + _QUANTIZED:
        return f"the cache is {dtype}, not float32, bfloat16, int8 or float8"
    if dtype in _PLAIN and key_scale is not None:
        return f"a cache of {dtype} has scales"
    if slots % BLOCK:
        return f"{slots} slots are no multiple of {BLOCK}"
    if mask is not None and q.shape[1] > MOST_NODES:
        return f"a tree pass of {q.shape[1]} rows is larger than {MOST_NODES}"
    shape = pass_of(q, keys, mask is not None, key_scale is not None)
    if shape.width % (_ALIGN_BYTES // dtype.itemsize):
        align = _ALIGN_BYTES // dtype.itemsize
        return f"heads of {shape.width} x {dtype} are no multiple of {align}"
    if sized(shape) is None:
        needed = shape.n_bytes / 2**20
        most = VMEM_BYTES / 2**20
        return f"a tile and a block need {needed:.0f} MiB of VMEM, more than {most:.0f}"
    return None


def tree_attention(
    q: Float[Array, "R T H M"],
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    length: Int[Array, " R"],
    *,
    rows: Int[Array, " R"] | None = None,
    mask: Bool[Array, "R T T"] | None = None,
    offsets: Int[Array, "R T"] | None = None,
    scale: float,
    window: int | None = None,
    sinks: int = 0,
    soft_cap: float | None = None,
    key_scale: Float[Array, "B K S"] | None = None,
    value_scale: Float[Array, "B K S"] | None = None,
    interpret: Any = False,
) -> Float[Array, "R T H M"]:
    """Attends from T new rows to the cache; see ``specjax.ops.attention``.

    Scores, softmax and sums are float32. Products take float32 where queries or cache
    have it, at highest precision, else bfloat16, the softmax's weights rounded to it.

    Args:
      q: queries, rotated.
      keys: cache after this pass's rows were written at [length, length + T), which
        lie inside it. What lies beyond is never used, NaN included.
      values: as keys.
      length: committed tokens of each addressed row before this pass.
      rows: the batch row of the cache that each row of queries addresses; None: row r
        addresses row r.
      mask: which of the new rows each new row sees; None: a chain.
      offsets: how far behind ``length`` each new row stands, none before it; None: a
        chain.
      scale: factor on the scores.
      window: sliding window in tokens, or None.
      sinks: with a window, first tokens of the text that are seen besides it.
      soft_cap: scores are ``soft_cap * tanh(scores / soft_cap)``; None: as they are.
      key_scale: of a quantised cache, a factor for each slot and head, float32.
      value_scale: likewise.
      interpret: as in ``pallas_call``.

    Returns:
      Attention output, float32.

    Raises:
      ValueError: the kernel can't take such arguments.
    """
    if (reason := supports(q, keys, mask=mask, key_scale=key_scale)) is not None:
        raise ValueError(f"The TPU kernel can't take this: {reason}.")
    if (mask is None) != (offsets is None):
        raise ValueError("Pass mask= and offsets= together, or neither for a chain.")
    if (key_scale is None) != (value_scale is None):
        raise ValueError("Pass key_scale= and value_scale= together, or neither.")
    p = pass_of(q, keys, mask is not None, key_scale is not None)
    p = sized(p) or p
    p = p._replace(scale=scale, window=window, soft_cap=soft_cap)
    if window is not None:
        p = p._replace(sinks=min(sinks, keys.shape[2]))
    length = length.astype(jnp.int32)
    rows = jnp.arange(p.n_rows) if rows is None else rows
    caches = (keys, values)
    if p.turned:
        caches = (keys.swapaxes(2, 3), values.swapaxes(2, 3))
    if key_scale is not None and value_scale is not None:
        caches += (key_scale.astype(jnp.float32), value_scale.astype(jnp.float32))
    if mask is None or offsets is None:
        marks = jnp.broadcast_to(jnp.arange(p.n_new)[None, :, None], (1, p.n_new, 1))
    else:
        marks = tree_marks(mask, offsets, length, p)
    marks = tiled(marks[:, :, None, None, :].astype(jnp.int32), p)[:, 0]
    grouped = q.reshape(p.n_rows, p.n_new, p.n_kv, p.group, p.width)
    out = _call(
        p,
        interpret,
        (length, rows.astype(jnp.int32)),
        tiled(grouped.astype(p.operand), p),
        marks,
        caches,
    )
    return untiled(out, p)


def _call(
    p: Pass,
    interpret: Any,
    scalars: tuple[Array, Array],
    q: Array,
    marks: Array,
    caches: tuple[Array, ...],
) -> Array:
    """Runs the kernel on tiles. float32 [R, K, tiles, rows, M]."""
    _, _, _, rows, width = q.shape
    shared = marks.shape[0] == 1
    tile = pl.BlockSpec(
        (None, p.heads, p.tiles, rows, width), lambda r, k, t, *_: (r, k, t, 0, 0)
    )
    mark = pl.BlockSpec(
        (None, p.tiles, rows, marks.shape[-1]),
        lambda r, k, t, *_: (0 if shared else r, t, 0, 0),
    )
    block = (p.width, BLOCK) if p.turned else (BLOCK, p.width)
    blocks = [(2, p.heads, *(block if x.ndim == 4 else (BLOCK,))) for x in caches]
    state = pltpu.VMEM((p.heads, p.tiles, rows, LANES), jnp.float32)
    slots = caches[0].shape[3 if p.turned else 2]
    read = 2 * p.n_rows * p.n_kv * slots * width * p.dtype.itemsize
    return pl.pallas_call(
        functools.partial(_kernel, p=p, n_caches=len(caches)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=p.grid,
            in_specs=[tile, mark] + [pl.BlockSpec(memory_space=pl.ANY) for _ in caches],
            out_specs=tile,
            scratch_shapes=[
                *(
                    pltpu.VMEM(block, cache.dtype)
                    for block, cache in zip(blocks, caches, strict=True)
                ),
                state,
                state,
                pltpu.SemaphoreType.DMA((2, len(caches))),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        # In order on one core: a step begins the next one's transfers.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=4 * q.size * slots,
            transcendentals=q.size // width * slots,
            bytes_accessed=read + 6 * q.size,
        ),
        interpret=interpret,
        name="tree_attention",
    )(*scalars, q, marks, *caches)


def _kernel(
    length_ref: Any, row_ref: Any, q_ref: Any, marks_ref: Any, *refs: Any, **static: Any
) -> None:
    """Takes one step of the grid."""
    p, n_caches = static["p"], static["n_caches"]
    caches, out_ref = refs[:n_caches], refs[n_caches]
    buffers = refs[n_caches + 1 : 2 * n_caches + 1]
    peak_ref, total_ref, arrived, turn = refs[2 * n_caches + 1 :]
    n_rows, n_groups, n_chunks = p.grid
    step = pl.program_id(0) * n_groups + pl.program_id(1)
    step = step * n_chunks + pl.program_id(2)
    length = length_ref[pl.program_id(0)]
    live = _live(length, p)

    def transfers(step: Array, block: Any, buffer: Any) -> list[Any]:
        pair = lax.div(step, np.int32(n_chunks))
        row = lax.div(pair, np.int32(n_groups))
        head = lax.rem(pair, np.int32(n_groups)) * p.heads
        first = _live(length_ref[row], p).slot(block)
        where, slots = (row_ref[row], pl.ds(head, p.heads)), pl.ds(first, BLOCK)
        found = []
        for i, (cache, into) in enumerate(zip(caches, buffers, strict=True)):
            wide = p.turned and len(cache.shape) == 4
            part = cache.at[(*where, slice(None), slots) if wide else (*where, slots)]
            into = into.at[buffer]
            found.append(pltpu.make_async_copy(part, into, arrived.at[buffer, i]))
        return found

    def start(step: Array, block: Any, buffer: Any) -> None:
        for transfer in transfers(step, block, buffer):
            transfer.start()

    @pl.when(step == 0)
    def _():
        turn[0] = np.int32(0)
        start(step, np.int32(0), np.int32(0))

    peak_ref[...] = jnp.full(peak_ref.shape, _MASKED, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)
    before = turn[0]

    @pl.loop(0, live.count)
    def _(i):
        buffer = lax.bitwise_and(before + i, np.int32(1))
        is_last = i + 1 == live.count

        @pl.when(jnp.logical_not(is_last))
        def _():
            start(step, i + 1, 1 - buffer)

        @pl.when(is_last & (step + 1 < n_rows * n_groups * n_chunks))
        def _():
            start(step + 1, np.int32(0), 1 - buffer)

        for transfer in transfers(step, i, buffer):
            transfer.wait()
        slot, block = live.slot(i), [b.at[buffer] for b in buffers]

        @pl.when(slot + BLOCK > length + p.n_new)
        def _():
            _clear(block[1], length + p.n_new - slot, p)

        @pl.loop(0, p.tiles)
        def _(tile):
            seen = _seen(slot, length, marks_ref.at[tile], p)
            for head in range(p.heads):
                state = [r.at[head, tile] for r in (peak_ref, total_ref, out_ref)]
                _attend(q_ref[head, tile], [b.at[head] for b in block], seen, state, p)

    turn[0] = lax.bitwise_and(before + live.count, np.int32(1))

    @pl.loop(0, p.tiles)
    def _(tile):
        for head in range(p.heads):
            total = jnp.sum(total_ref[head, tile], axis=1, keepdims=True)
            out_ref[head, tile] = out_ref[head, tile] / total


class _Live(NamedTuple):
    """The blocks that a row's pass looks at: those of the sinks, then the rest.

    Attributes:
      n_sinks: blocks from slot 0.
      skip: how many are left out behind them, as no row's window reaches them.
      count: blocks looked at, one at least.
    """

    n_sinks: Any
    skip: Any
    count: Any

    def slot(self, i: Any) -> Any:
        """First slot of the i-th of them."""
        block = i + jnp.where(i < self.n_sinks, 0, self.skip)
        return pl.multiple_of(block * BLOCK, BLOCK)


def _live(length: Array, p: Pass) -> _Live:
    end = lax.div(length + np.int32(p.n_new + BLOCK - 1), np.int32(BLOCK))
    zero = jnp.zeros_like(end)
    if p.window is None:
        return _Live(zero, zero, end)
    n_sinks = jnp.minimum(np.int32(-(-p.sinks // BLOCK)), end)
    first = jnp.maximum(length - np.int32(p.window - 1), 0)
    skip = jnp.maximum(lax.div(first, np.int32(BLOCK)) - n_sinks, 0)
    return _Live(n_sinks, skip, end - skip)


def _seen(slot: Array, length: Array, marks_ref: Any, p: Pass) -> Array:
    """Says which slots of a block each row of a tile sees. bool [rows, BLOCK]."""
    slots = slot + lax.broadcasted_iota(jnp.int32, (1, BLOCK), 1)
    marks = marks_ref[...]
    position = length + marks[:, :1]
    seen = slots < length if p.n_words else slots <= position
    if p.window is not None:
        seen = seen & ((slots > position - p.window) | (slots < p.sinks))
    if not p.n_words:
        return seen
    # The pass's own rows, of which a tree's marks say what a row sees, window included.
    own = slots - length
    bit = lax.shift_left(jnp.ones_like(own), lax.bitwise_and(own, WORD_BITS - 1))
    word = lax.shift_right_arithmetic(own, jnp.full_like(own, 5))
    named = jnp.zeros((p.rows, BLOCK), jnp.int32)
    for i in range(p.n_words):
        named |= jnp.where(word == i, lax.bitwise_and(marks[:, i + 1 : i + 2], bit), 0)
    return seen | (named != 0)


def _attend(q: Array, block: list[Any], seen: Array, state: list[Any], p: Pass) -> None:
    """Adds a block of a head to the sums of a tile."""
    peak_ref, total_ref, out_ref = state
    scores = _product(q, block[0][...].astype(p.operand), not p.turned)
    scores = scores * p.scale
    if p.scaled:
        scores = scores * block[2][...][None, :]
    if p.soft_cap is not None:
        scores = p.soft_cap * jnp.tanh(scores / p.soft_cap)
    scores = jnp.where(seen, scores, _MASKED)
    before = peak_ref[...][:, :1]
    peak = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    keep, weights = jnp.exp(before - peak), jnp.exp(scores - peak)
    if p.scaled:
        # Scales of slots that hold nothing may be NaN.
        mixing = jnp.where(seen, weights * block[3][...][None, :], 0.0)
        mixing = mixing.astype(p.operand)
    else:
        # The total is of what is multiplied, so that the weights' rounding cancels
        # where one of them is nearly all.
        mixing = weights.astype(p.operand)
        weights = mixing.astype(jnp.float32)
    # Summed over lanes once, at the end.
    parts = [weights[:, i : i + LANES] for i in range(0, BLOCK, LANES)]
    total_ref[...] = total_ref[...] * keep + sum(parts[1:], parts[0])
    peak_ref[...] = jnp.broadcast_to(peak, peak_ref.shape)
    mixed = _product(mixing, block[1][...].astype(p.operand), p.turned)
    out_ref[...] = out_ref[...] * keep + mixed


def _product(rows: Array, block: Array, last: bool) -> Array:
    """Multiplies rows by a block, contracting its last or its first axis."""
    exact = rows.dtype == jnp.float32
    return lax.dot_general(
        rows,
        block,
        (((1,), (int(last),)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _clear(values: Any, n_live: Array, p: Pass) -> None:
    """Sets values behind a row's end to zero: zero times NaN is NaN."""
    if p.dtype == jnp.int8:
        return  # has no NaN
    per_word = 4 // p.dtype.itemsize
    first, last = (p.width, BLOCK) if p.turned else (BLOCK, p.width)
    shape = (first // per_word, last)
    if p.turned:
        live = lax.broadcasted_iota(jnp.int32, shape, 1) < n_live
        live = jnp.where(live, np.int32(-1), 0)
    else:
        # Slots share words of 32 bits.
        word, bits = lax.broadcasted_iota(jnp.int32, shape, 0), WORD_BITS // per_word
        live = jnp.zeros(shape, jnp.int32)
        for piece in range(per_word):
            mask = np.uint32((2**bits - 1) << (bits * piece)).astype(np.int32)
            live |= jnp.where(word * per_word + piece < n_live, mask, 0)
    for head in range(p.heads):
        words = pltpu.bitcast(values[head], jnp.int32)
        values[head] = pltpu.bitcast(lax.bitwise_and(words, live), p.dtype)
