"""Attention of a pass over a length-bounded cache, on GPU (Mosaic GPU).

A thread block takes one key/value head of one row of the pass, a tile of 64 packed
query rows (new tokens times the query heads that share the head), and one split: a
fixed number of cache slots. It goes over the split's blocks of 64 slots, brought to
shared memory by TMA a few blocks ahead, with a softmax that is rescaled as its peak
grows, and leaves (sums, peak, total). A second kernel adds the splits of each query
row by the same formula, in rising order.

Blocks and splits are counted from position 0 and have one size; tiles have one shape.
So what is computed of a query row, and in what order, depends on its position and on
what it sees, and on nothing else: neither T, nor its place in the pass, nor the batch.

Two ways to multiply: ``wgmma`` (sm_90), operands in shared memory, and warp-level
``mma`` (sm_120, sm_121), operands in registers. All else is the same code. The
interpreter has no ``mma``; there it is a product of the same operands.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.typing import Array, Bool, Float, Int

Arch = Literal["sm_90", "sm_120"]

# What its stubs do not know.
_untyped: Any = plgpu

#: Shared memory that a thread block may ask for, in bytes.
SMEM_BYTES: dict[Arch, int] = {"sm_90": 232448, "sm_120": 101376}

#: Cache slots that a thread block goes over. A part of the results' definition: other
#: sizes round otherwise.
SPLIT = 512

# Query rows of a tile: what one wgmma takes.
_TILE = 64

# Slots of a block. With 128 wide heads in bfloat16 two stages of keys and values are
# 64 KiB, the queries 16 and the weights 8: it fits a GB10's 99 KiB, and an H200 holds
# two thread blocks, one of which multiplies while the other does its softmax.
_BLOCK = 64

# Stages beyond these hide nothing more.
_MOST_STAGES = 4

# Shared memory for barriers and for what reductions exchange, with room to spare.
_SMALL_BYTES = 6144

# Shared memory of a multiprocessor beyond what one thread block may have.
_CORE_EXTRA = 1024

# Splits whose loads are on their way together when they are added.
_UNROLL = 4

# From this many thread blocks on one of them takes all splits of its tile, so that
# they need not all be held: there is work enough without dividing it further.
_ENOUGH_BLOCKS = 128

# Finite, so that a row that sees nothing of a split leaves no NaN: its weight is wiped
# to exactly zero by the first slot that it sees.
_MASKED = -1e30

_LOG2_E = math.log2(math.e)

# One number for each query row of a tile, and any row of a multiple of 64 numbers.
_ROW = plgpu.Layout.WGMMA.reduce(1)
_COLUMN = plgpu.Layout.WGMMA.reduce(0)
_MATRIX = plgpu.Layout.WGMMA

_WIDTHS = (64, 128)
_QUANTIZED = (jnp.int8, jnp.float8_e4m3fn)

_State = tuple[Array, Array, Array]


def device_arch(capability: str | tuple[int, int]) -> Arch | None:
    """Picks the instructions for a device.

    Args:
      capability: of the device, as in ``jax.devices()[0].compute_capability`` ("9.0")
        or as numbers.

    Returns:
      ``sm_90`` or ``sm_120``; None: the device has neither.
    """
    if isinstance(capability, str):
        parts = capability.split(".")
        capability = (int(parts[0]), int(parts[1]) if len(parts) > 1 else 0)
    if capability == (9, 0):
        return "sm_90"
    return "sm_120" if capability in ((12, 0), (12, 1)) else None


def supports(
    q: Any,
    keys: Any,
    *,
    arch: Arch | None,
    key_scale: Any = None,
    smem_bytes: int | None = None,
) -> str | None:
    """Says why the kernel can't take such a pass.

    Args:
      q: queries; shape and dtype are looked at.
      keys: cache; likewise, and values are like it.
      arch: from ``device_arch``.
      key_scale: scales of a quantised cache, or None.
      smem_bytes: shared memory of a thread block; None: the architecture's.

    Returns:
      None if it can, else the reason.
    """
    width, slots = q.shape[-1], keys.shape[2]
    if arch not in SMEM_BYTES:
        return "the device has neither sm_90's wgmma nor sm_120's mma"
    if q.dtype != jnp.bfloat16:
        return f"queries are {q.dtype}; they must be bfloat16"
    if keys.dtype == jnp.float32:
        return "the cache is float32; tensor cores would round it to tf32"
    quantized = keys.dtype in _QUANTIZED
    if not quantized and keys.dtype != jnp.bfloat16:
        return f"the cache is {keys.dtype}; it must be bfloat16, int8 or float8_e4m3fn"
    if quantized != (key_scale is not None):
        return f"a cache of {keys.dtype} has {'no ' * quantized}scales"
    if width not in _WIDTHS:
        return f"heads are {width} wide; they must be one of {_WIDTHS}"
    if slots % _BLOCK:
        return f"{slots} slots are no multiple of {_BLOCK}"
    if _n_stages(width, quantized, arch, smem_bytes) < 2:
        return f"{smem_bytes} bytes of shared memory hold no two blocks of keys"
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
    arch: Arch = "sm_90",
    smem_bytes: int | None = None,
    split: int = SPLIT,
    sequential: bool | None = None,
    interpret: Any = False,
) -> Float[Array, "R T H M"]:
    """Attends from T new rows to the cache; see ``specjax.ops.attention``.

    Scores, softmax and sums are float32; products take bfloat16 operands, the softmax's
    weights rounded to it.

    Args:
      q: queries, rotated, bfloat16.
      keys: cache after this pass's rows were written at [length, length + T): bfloat16,
        or int8 or float8_e4m3fn with scales. What lies beyond is never used.
      values: as keys.
      length: committed tokens of each addressed row before this pass.
      rows: the batch row of the cache that each row of queries addresses; None: row r
        addresses row r.
      mask: which of the new rows each new row sees; None: a chain.
      offsets: how far behind ``length`` each new row stands; None: a chain.
      scale: factor on the scores.
      window: sliding window in tokens, or None.
      sinks: with a window, first tokens of the text that are seen besides it.
      soft_cap: scores are ``soft_cap * tanh(scores / soft_cap)``; None: as they are.
      key_scale: of a quantised cache, a factor for each slot and head.
      value_scale: likewise.
      arch: instructions to use, from ``device_arch``.
      smem_bytes: shared memory of a thread block; None: the architecture's.
      split: slots of a split, a multiple of 64; see ``SPLIT``.
      sequential: whether one thread block takes all splits of its tile, one after the
        other; the result is the same. None: if there are many tiles.
      interpret: as in ``plgpu.kernel``.

    Returns:
      Attention output, float32.

    Raises:
      ValueError: the kernel can't take such arguments.
    """
    reason = supports(q, keys, arch=arch, key_scale=key_scale, smem_bytes=smem_bytes)
    if reason is not None:
        raise ValueError(f"The GPU kernel can't take this: {reason}.")
    if (mask is None) != (offsets is None):
        raise ValueError("Pass mask= and offsets= together, or neither for a chain.")
    if split % _BLOCK:
        raise ValueError(f"{split=} is no multiple of {_BLOCK}.")
    n_rows, n_new, n_heads, width = q.shape
    n_kv, slots = keys.shape[1], keys.shape[2]
    quantized = key_scale is not None
    group = n_heads // n_kv
    n_tiles = -(-n_new * group // _TILE)
    if sequential is None:
        sequential = n_rows * n_kv * n_tiles >= _ENOUGH_BLOCKS
    shape = _Pass(
        n_new=n_new,
        group=group,
        width=width,
        tree=mask is not None,
        scale=scale,
        window=window,
        sinks=min(sinks, slots) if window is not None else 0,
        soft_cap=soft_cap,
        dtype=jnp.dtype(keys.dtype),
        n_blocks=split // _BLOCK,
        n_splits=-(-slots // split),
        n_stages=_n_stages(width, quantized, arch, smem_bytes),
        sequential=sequential,
        arch=arch,
        interpreted=bool(interpret),
    )
    length = length.astype(jnp.int32)
    rows = jnp.arange(n_rows) if rows is None else rows
    inputs = {"length": length, "rows": rows.astype(jnp.int32), "q": _pack(q, n_kv)}
    inputs |= {"keys": keys, "values": values}
    if quantized:
        inputs |= {"key_scale": key_scale, "value_scale": value_scale}
    if shape.positional:
        inputs["position"] = _positions(length, offsets, shape)
    if mask is not None and offsets is not None:
        inputs["seen"] = _own_view(length, mask, offsets, shape)
    n_parts = 1 if sequential else shape.n_splits
    part = (n_rows, n_kv, n_parts, n_tiles * _TILE)
    parts = plgpu.kernel(
        functools.partial(_attend, shape=shape, names=tuple(inputs)),
        out_type=(
            jax.ShapeDtypeStruct((*part, width), jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
        ),
        scratch_types=_scratch(shape),
        grid=(n_rows, n_parts, n_kv, n_tiles),
        grid_names=("attention_row", "attention_split", "attention_head", "tile"),
        interpret=interpret or None,
        kernel_name="tree_attention",
    )(*inputs.values())
    return plgpu.kernel(
        functools.partial(_add_splits, shape=shape),
        out_type=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid=(n_rows, n_new, n_heads),
        grid_names=("attention_row", "attention_new", "attention_head"),
        interpret=interpret or None,
        kernel_name="tree_attention_splits",
    )(length, *parts)


def _pack(q: Array, n_kv: int) -> Array:
    """Packs the query rows of each key/value head, padded to whole tiles."""
    n_rows, n_new, n_heads, width = q.shape
    q = q.reshape(n_rows, n_new, n_kv, n_heads // n_kv, width)
    q = q.transpose(0, 2, 1, 3, 4).reshape(n_rows, n_kv, -1, width)
    return jnp.pad(q, ((0, 0), (0, 0), (0, -q.shape[2] % _TILE), (0, 0)))


def _positions(length: Array, offsets: Array | None, shape: "_Pass") -> Array:
    """Returns where each packed query row stands, as [R, rows]."""
    padded = -(-shape.n_new * shape.group // _TILE) * _TILE
    if offsets is None:
        return length[:, None] + jnp.arange(padded) // shape.group
    packed = jnp.repeat(offsets.astype(jnp.int32), shape.group, axis=1)
    packed = jnp.pad(packed, ((0, 0), (0, padded - packed.shape[1])))
    return length[:, None] + packed


def _own_view(length: Array, mask: Array, offsets: Array, shape: "_Pass") -> Array:
    """Says what packed query rows see of the blocks that hold the pass's own rows.

    The first of these blocks is the one that ``length`` lies in; of its committed
    slots a row sees those in its window.

    Returns:
      int8 [R, rows, slots of these blocks].
    """
    n_new, window = shape.n_new, shape.window
    n_blocks = -(-(n_new - 1) // _BLOCK) + 1
    slot = (length // _BLOCK * _BLOCK)[:, None] + jnp.arange(n_blocks * _BLOCK)
    own = slot - length[:, None]
    is_new, node = (own >= 0) & (own < n_new), jnp.clip(own, 0, n_new - 1)
    seen = jnp.take_along_axis(mask, node[:, None, :], axis=2) & is_new[:, None]
    seen |= (own < 0)[:, None]
    if window is not None:
        stands = length[:, None] + jnp.take_along_axis(offsets, node, axis=1)
        stands = jnp.where(is_new, stands, slot)[:, None]
        near = stands > (length[:, None] + offsets)[:, :, None] - window
        seen &= near | (stands < shape.sinks)
    seen = jnp.repeat(seen.astype(jnp.int8), shape.group, axis=1)
    return jnp.pad(seen, ((0, 0), (0, -seen.shape[1] % _TILE), (0, 0)))


class _Pass(NamedTuple):
    """What is static of a pass.

    Attributes:
      n_new: T.
      group: query heads of a key/value head.
      width: M.
      tree: whether it has a mask; else it is a chain.
      scale: factor on the scores.
      window: sliding window, or None.
      sinks: first tokens that are seen besides it.
      soft_cap: of the scores, or None.
      dtype: of the cache.
      n_blocks: blocks of a split.
      n_splits: of the cache.
      n_stages: blocks that shared memory holds.
      sequential: whether a thread block takes all splits.
      arch: instructions to use.
      interpreted: whether the interpreter runs it.
    """

    n_new: int
    group: int
    width: int
    tree: bool
    scale: float
    window: int | None
    sinks: int
    soft_cap: float | None
    dtype: Any
    n_blocks: int
    n_splits: int
    n_stages: int
    sequential: bool
    arch: Arch
    interpreted: bool

    @property
    def quantized(self) -> bool:
        """Whether the cache has scales."""
        return self.dtype != jnp.bfloat16

    @property
    def positional(self) -> bool:
        """Whether it matters where query rows stand."""
        return not self.tree or self.window is not None


class _Live(NamedTuple):
    """The blocks, or the splits, of a row that are looked at.

    These are [0, end), less [n_sinks, n_sinks + skip) which lies before the window.

    Attributes:
      n_sinks: those that hold sinks.
      skip: how many are left out.
      end: behind the last.
    """

    n_sinks: int
    skip: Array
    end: Array

    @property
    def n(self) -> Array:
        """How many are looked at."""
        return self.count(self.end)

    def count(self, at: Array) -> Array:
        """Returns how many of them lie before a place."""
        at = jnp.minimum(at, self.end)
        return jnp.minimum(at, jnp.maximum(at - self.skip, self.n_sinks))

    def at(self, i: Array) -> Array:
        """Returns the place of the i-th of them."""
        return jnp.where(i < self.n_sinks, i, i + self.skip)


def _live(length: Array, shape: _Pass, size: int) -> _Live:
    """Finds what is looked at of a row in pieces of so many slots."""
    end = lax.div(length + (shape.n_new + size - 1), size)
    if shape.window is None:
        return _Live(0, jnp.int32(0), end)
    # A row of the pass stands at ``length`` or behind it.
    first = lax.div(jnp.maximum(length - (shape.window - 1), 0), size)
    n_sinks = -(-shape.sinks // size)
    return _Live(n_sinks, jnp.maximum(first - n_sinks, 0), end)


def _stage_bytes(width: int, quantized: bool) -> int:
    """Returns the shared memory of a block of keys and values."""
    return 2 * _BLOCK * (width + 4 if quantized else 2 * width)


def _n_stages(width: int, quantized: bool, arch: Arch, smem_bytes: int | None) -> int:
    """Returns how many blocks of keys and values shared memory holds."""
    limit = SMEM_BYTES[arch] if smem_bytes is None else smem_bytes
    fixed = 2 * _TILE * (width + _BLOCK) + _SMALL_BYTES
    if quantized:
        fixed += 2 * _BLOCK * width
    stage = _stage_bytes(width, quantized)
    # Two thread blocks on a multiprocessor rather than one with more stages.
    shared = (limit + _CORE_EXTRA) // 2 - _CORE_EXTRA
    for budget in (shared, limit):
        n = (budget - fixed) // stage
        if n >= 2:
            return min(n, _MOST_STAGES)
    return 0


def _scratch(shape: _Pass) -> dict[str, Any]:
    """Describes a thread block's shared memory and barriers."""
    n, width = shape.n_stages, shape.width
    stage = (n, _BLOCK, width)
    arrivals = 2 if shape.quantized else 1
    scratch: dict[str, Any] = {
        "q_smem": _smem((_TILE, width), jnp.bfloat16),
        "weights_smem": _smem((_TILE, _BLOCK), jnp.bfloat16),
        "keys_smem": _smem(stage, shape.dtype),
        "values_smem": _smem(stage, shape.dtype),
        "q_ready": plgpu.Barrier(),
        "keys_ready": plgpu.Barrier(num_barriers=n, num_arrivals=arrivals),
        "values_ready": plgpu.Barrier(num_barriers=n, num_arrivals=arrivals),
    }
    if shape.quantized:
        scratch["wide_smem"] = _smem((_BLOCK, width), jnp.bfloat16)
        scratch["key_scale_smem"] = plgpu.SMEM((n, _BLOCK), jnp.float32)
        scratch["value_scale_smem"] = plgpu.SMEM((n, _BLOCK), jnp.float32)
    return scratch


def _smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Describes an array in shared memory that matrix instructions can read."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = _untyped.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(
        shape, dtype, transforms=(tiling, _untyped.SwizzleTransform(swizzle))
    )


def _attend(*refs: Any, shape: _Pass, names: tuple[str, ...], **scratch: Any) -> None:
    """Goes over one split, or over all of them, of a tile of query rows."""
    inputs, outputs = refs[: len(names)], refs[len(names) :]
    tile = _Tile(dict(zip(names, inputs, strict=True)) | scratch, outputs, shape)
    if not shape.sequential:
        tile.run(tile.split, tile.split + 1)
        return
    n_splits = lax.div(tile.live.end + (shape.n_blocks - 1), shape.n_blocks)
    tile.run(jnp.int32(0), n_splits)


class _Tile:
    """A tile of query rows of one key/value head of one row of the pass."""

    def __init__(self, refs: dict[str, Any], outputs: Any, shape: _Pass) -> None:
        self.refs, self.outputs, self.shape = refs, outputs, shape
        self.row = lax.axis_index("attention_row")
        self.split = lax.axis_index("attention_split")
        self.head = lax.axis_index("attention_head")
        self.packed = pl.ds(lax.axis_index("tile") * _TILE, _TILE)
        self.length = refs["length"][self.row]
        self.cache_row = refs["rows"][self.row]
        self.live = _live(self.length, shape, _BLOCK)
        self.first_own = lax.div(self.length, _BLOCK)
        self.end = self.length + shape.n_new

    def run(self, first_split: Array, end_split: Array) -> None:
        """Attends to splits, one after the other."""
        n_blocks, live = self.shape.n_blocks, self.live
        begin = live.count(first_split * n_blocks)
        end = live.count(end_split * n_blocks)

        @pl.when(begin < end)
        def _() -> None:
            refs = self.refs
            plgpu.copy_gmem_to_smem(
                refs["q"].at[self.row, self.head, self.packed],
                refs["q_smem"],
                refs["q_ready"],
            )
            for i in range(self.shape.n_stages):

                @pl.when(begin + i < end)
                def _(i: int = i) -> None:
                    self.fetch("keys", begin + i, i)
                    self.fetch("values", begin + i, i)

            plgpu.barrier_wait(refs["q_ready"])
            position = None
            if self.shape.positional:
                at = refs["position"].at[self.row, self.packed]
                position = plgpu.load(at, layout=_ROW, optimized=False)

            def step(split: Array, carry: None) -> None:
                low = live.count(split * n_blocks)
                high = live.count((split + 1) * n_blocks)

                @pl.when(low < high)
                def _() -> None:
                    state = self.over(low, high, begin, end, position)
                    self.leave(state, low == begin)

                return carry

            if self.shape.sequential:
                lax.fori_loop(first_split, end_split, step, None)
            else:
                step(first_split, None)

    def fetch(self, name: str, i: Array, slot: Any) -> None:
        """Starts to copy the i-th live block of keys or values to a stage."""
        refs = self.refs
        slots = pl.ds(self.live.at(i) * _BLOCK, _BLOCK)
        copied = (name, f"{name[:-1]}_scale") if self.shape.quantized else (name,)
        for array in copied:
            plgpu.copy_gmem_to_smem(
                refs[array].at[self.cache_row, self.head, slots],
                refs[f"{array}_smem"].at[slot],
                refs[f"{name}_ready"].at[slot],
            )

    def over(
        self, low: Array, high: Array, begin: Array, end: Array, position: Any
    ) -> _State:
        """Goes over live blocks [low, high); those of the tile are [begin, end)."""
        shape = self.shape
        full = lambda shape, value, layout: plgpu.layout_cast(
            jnp.full(shape, value, jnp.float32), layout
        )
        state = (
            full((_TILE, shape.width), 0.0, _MATRIX),
            full((_TILE,), _MASKED, _ROW),
            full((_TILE,), 0.0, _ROW),
        )

        def step(own: bool, i: Array, state: _State) -> _State:
            slot = lax.rem(i - begin, jnp.int32(shape.n_stages))
            return self.block(state, i, slot, end, position, own)

        # Only where the pass's own rows lie there is more to ask than the window.
        own = jnp.clip(self.live.count(self.first_own), low, high)
        state = lax.fori_loop(low, own, functools.partial(step, False), state)
        return lax.fori_loop(own, high, functools.partial(step, True), state)

    def block(
        self, state: _State, i: Array, slot: Array, end: Array, position: Any, own: bool
    ) -> _State:
        """Takes one block of slots into the softmax."""
        refs, shape = self.refs, self.shape
        start = self.live.at(i) * _BLOCK
        out, peak, total = state
        across = lambda x: lax.broadcast_in_dim(x, (_TILE, _BLOCK), [0])
        along = lambda x: lax.broadcast_in_dim(x, (_TILE, shape.width), [0])
        factor = lambda name: lax.broadcast_in_dim(
            plgpu.load(refs[name].at[slot], layout=_COLUMN), (_TILE, _BLOCK), [1]
        )
        plgpu.barrier_wait(refs["keys_ready"].at[slot])
        keys = self.operand("keys", slot, start, clean=False)
        scores = _product(
            refs["q_smem"], keys.transpose((1, 0)), (_TILE, _BLOCK), shape
        )
        if shape.quantized:
            scores = scores * factor("key_scale_smem")
        self.refill("keys", i, slot, end)
        seen = self.seen(start, position, own)
        # Else the products could be fused with what follows, which is not the same for
        # all blocks, and round otherwise.
        scores = lax.optimization_barrier(_finish(scores, shape))
        if seen is not None:
            scores = jnp.where(seen, scores, _MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - across(new_peak))
        keep = jnp.exp2(peak - new_peak)
        total = total * keep + jnp.sum(weights, axis=1)
        plgpu.barrier_wait(refs["values_ready"].at[slot])
        if shape.quantized:
            weights = weights * factor("value_scale_smem")
            if seen is not None:
                # A factor that nobody may use can be NaN.
                weights = jnp.where(seen, weights, 0.0)
        refs["weights_smem"][...] = weights.astype(jnp.bfloat16)
        values = self.operand("values", slot, start, clean=own)
        plgpu.commit_smem()
        mixed = _product(refs["weights_smem"], values, (_TILE, shape.width), shape)
        self.refill("values", i, slot, end)
        return out * along(keep) + mixed, new_peak, total

    def refill(self, name: str, i: Array, slot: Array, end: Array) -> None:
        """Starts to copy the block that a stage holds next."""
        n = self.shape.n_stages
        pl.when(i + n < end)(lambda: self.fetch(name, i + n, slot))

    def operand(self, name: str, slot: Array, start: Array, *, clean: bool) -> Any:
        """Returns a block in shared memory as bfloat16.

        Args:
          name: ``keys`` or ``values``.
          slot: stage.
          start: first slot of the block.
          clean: whether slots may lie behind the row's end: these become zero, as zero
            times NaN is NaN.
        """
        refs, width = self.refs, self.shape.width
        source = refs[f"{name}_smem"].at[slot]

        def live(x: Array) -> Array:
            at = plgpu.broadcasted_iota(jnp.int32, (_BLOCK, width), 0, layout=_MATRIX)
            return jnp.where(at + start < self.end, x, jnp.zeros((), x.dtype))

        if self.shape.quantized:
            x = plgpu.load(source, layout=_MATRIX, optimized=False)
            x = x.astype(jnp.float32)
            refs["wide_smem"][...] = (live(x) if clean else x).astype(jnp.bfloat16)
            plgpu.commit_smem()
            return refs["wide_smem"]
        if clean:

            @pl.when(start + _BLOCK > self.end)
            def _() -> None:
                source[...] = live(plgpu.load(source, layout=_MATRIX))

        return source

    def seen(self, start: Array, position: Any, own: bool) -> Array | None:
        """Says which slots of a block the query rows see; None: all."""
        shape = self.shape
        if own and shape.tree:
            first = start - self.first_own * _BLOCK
            at = self.refs["seen"].at[self.row, self.packed, pl.ds(first, _BLOCK)]
            view = plgpu.load(at, layout=_MATRIX, optimized=False)
            return view.astype(jnp.int32) != 0
        if not own and shape.window is None:
            return None
        slot = start + plgpu.broadcasted_iota(
            jnp.int32, (_TILE, _BLOCK), 1, layout=_MATRIX
        )
        stands = lax.broadcast_in_dim(position, (_TILE, _BLOCK), [0])
        seen = slot <= stands
        if shape.window is not None:
            near = slot > stands - shape.window
            seen &= (near | (slot < shape.sinks)) if shape.sinks else near
        return seen

    def leave(self, state: _State, first: Array) -> None:
        """Leaves a split's result, added to what earlier splits left."""
        part = 0 if self.shape.sequential else self.split
        at = (self.row, self.head, part, self.packed)
        layouts = (_MATRIX, _ROW, _ROW)
        places = [ref.at[at] for ref in self.outputs]

        def store(state: _State) -> None:
            for place, x in zip(places, state, strict=True):
                plgpu.store(place, x, optimized=False)

        if not self.shape.sequential:
            store(state)
            return
        pl.when(first)(lambda: store(state))

        @pl.when(jnp.logical_not(first))
        def _() -> None:
            out, peak, total = (
                plgpu.load(place, layout=layout, optimized=False)
                for place, layout in zip(places, layouts, strict=True)
            )
            wide = lambda x: lax.broadcast_in_dim(x, out.shape, [0])
            store(_add((out, peak, total), state, wide))


def _finish(scores: Array, shape: _Pass) -> Array:
    """Scales and caps products, in units of log 2."""
    if shape.soft_cap is None:
        return scores * (shape.scale * _LOG2_E)
    cap = shape.soft_cap
    return jnp.tanh(scores * (shape.scale / cap)) * (cap * _LOG2_E)


def _add(old: _State, new: _State, wide: Callable[[Array], Array]) -> _State:
    """Adds what two sets of slots gave, by their log-sum-exp."""
    peak = jnp.maximum(old[1], new[1])
    keep, take = jnp.exp2(old[1] - peak), jnp.exp2(new[1] - peak)
    products = (
        *(old[0] * wide(keep), new[0] * wide(take)),
        *(old[2] * keep, new[2] * take),
    )
    # Two kernels add splits; a compiler may fuse a product and a sum in one of them.
    kept, taken, kept_total, taken_total = lax.optimization_barrier(products)
    return kept + taken, peak, kept_total + taken_total


def _product(a: Any, b: Any, out: tuple[int, int], shape: _Pass) -> Array:
    """Multiplies two matrices in shared memory.

    Args:
      a: [rows, X], bfloat16.
      b: [X, columns], bfloat16.
      out: rows and columns.
      shape: the pass.

    Returns:
      float32.
    """
    if shape.arch == "sm_90":

        def multiply(acc: Any) -> Array:
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return pl.run_scoped(multiply, _untyped.ACC(out, jnp.float32))
    acc = plgpu.layout_cast(
        jnp.zeros(out, jnp.float32), plgpu.Layout.MMA_ACC(jnp.bfloat16)
    )
    left = plgpu.load(a, layout=plgpu.Layout.MMA_LHS(jnp.bfloat16))
    right = plgpu.load(b, layout=plgpu.Layout.MMA_RHS(jnp.bfloat16))
    if shape.interpreted:
        return acc + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(acc, left, right)


def _add_splits(
    length_ref: Any,
    out_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    added_ref: Any,
    *,
    shape: _Pass,
) -> None:
    """Adds the splits of one query row, in rising order."""
    row = lax.axis_index("attention_row")
    new = lax.axis_index("attention_new")
    head = lax.axis_index("attention_head")
    kv, packed = lax.div(head, shape.group), lax.rem(head, shape.group)
    packed = packed + new * shape.group
    if shape.sequential:
        live = _Live(0, jnp.int32(0), jnp.int32(1))
    else:
        live = _live(length_ref[row], shape, shape.n_blocks * _BLOCK)
    n = live.n

    def step(i: Array, state: _State) -> _State:
        found = []
        for u in range(_UNROLL if shape.n_splits > 1 else 1):
            j = i * _UNROLL + u
            # Beyond the last: that one again, with a weight of exactly zero.
            at = (row, kv, live.at(jnp.minimum(j, n - 1)), packed)
            out = plgpu.load(out_ref.at[at], layout=_ROW, optimized=False)
            peak = jnp.where(j < n, peak_ref[at], _MASKED)
            found.append((out, peak, total_ref[at]))
        for new in found:
            state = _add(state, new, lambda x: x)
        return state

    nothing = plgpu.layout_cast(jnp.zeros((shape.width,), jnp.float32), _ROW)
    state = (nothing, jnp.float32(_MASKED), jnp.float32(0.0))
    out, _, total = lax.fori_loop(0, lax.div(n + _UNROLL - 1, _UNROLL), step, state)
    plgpu.store(added_ref.at[row, new, head], out / total, optimized=False)
