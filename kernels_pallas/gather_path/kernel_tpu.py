"""Compaction of accepted tree nodes on TPU: every layer's keys and values in one call.

A memory transfer moves whole tiles of slots (8 rows of 32 bits, so 16 bfloat16 or 32
8-bit slots), and a node is one slot. So the tiles that hold the pass's slots are read
into VMEM, the nodes are moved there, and the first tiles are written back; what else
is in them goes back bit for bit. Narrow slots share 32-bit words and are moved as
pieces of integers: nothing is ever computed with the numbers themselves, so NaNs keep
their bits and stay where they are.

The grid goes over the batch; a batch row without a move transfers nothing. Within a
step the arrays follow each other through a ring of buffers.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.typing import Array, Int

_LANES = 128
_SUBLANES = 8
_WORD_BYTES = 4

# Buffers of the ring, the most and the fewest.
_RINGS = (4, 2)

# What the ring may hold of VMEM; the compiler's own limit is 16 MiB on v5e.
_VMEM_BYTES = 12 * 2**20


class _Window(NamedTuple):
    """The slots that are transferred of one batch row of one array.

    Attributes:
      heads: K.
      slots: of the array, S.
      width: of a head, M; None for an array of scales.
      dtype: of the array.
      align: slots of a tile.
      read: slots read; whole tiles around the pass's slots.
      back: slots written back; whole tiles around the path's slots.
    """

    heads: int
    slots: int
    width: int | None
    dtype: jnp.dtype
    align: int
    read: int
    back: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the buffer of one array."""
        rows = (self.heads, self.read)
        return rows if self.width is None else (*rows, self.width)

    @property
    def per_word(self) -> int:
        """Slots that share 32-bit words."""
        return _WORD_BYTES // self.dtype.itemsize

    @property
    def words_shape(self) -> tuple[int, ...]:
        """Of a buffer of those words; as small as can be where slots are words."""
        if self.per_word == 1:
            return (1, _SUBLANES, _LANES)
        assert self.width is not None
        return (self.heads, self.read // self.per_word, self.width)

    @property
    def n_bytes(self) -> int:
        """Of that buffer in VMEM, padding included."""
        if self.width is None:
            return _round_up(self.heads, _SUBLANES) * self.read * self.dtype.itemsize
        lanes = _round_up(self.width, _LANES)
        return self.heads * self.read * lanes * self.dtype.itemsize

    def first(self, start: Array, size: int) -> Array:
        """First of ``size`` slots in whole tiles around ``start``, inside the array."""
        tile = lax.bitwise_and(start, np.int32(-self.align))
        return pl.multiple_of(jnp.minimum(tile, self.slots - size), self.align)


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
        shape, dtype = cache.shape, jnp.dtype(cache.dtype)
        if dtype.itemsize not in (1, 2, 4):
            return f"a cache of {dtype} has no 8, 16 or 32 bits a number"
        if len(shape) == 3 and dtype.itemsize != _WORD_BYTES:
            return f"scales are {dtype}; they must have 32 bits"
        align = _align(len(shape), dtype)
        if shape[2] % align:
            return f"{shape[2]} slots of {dtype} are no multiple of {align}"
    windows = set(_windows(caches, n_nodes, depth))
    needed = sum(w.n_bytes for w in windows) * (_RINGS[-1] + 1)
    if needed > _VMEM_BYTES:
        return (
            f"the slots of {n_nodes} nodes need {needed / 2**20:.0f} MiB of VMEM, more "
            f"than {_VMEM_BYTES / 2**20:.0f}; use a smaller tree"
        )
    for width in (x.shape[3] for x in caches if len(x.shape) == 4):
        if width % _LANES:
            # XLA keeps such arrays with the slots last.
            return (
                f"heads of {width} are no multiple of {_LANES}: the cache would be "
                "copied"
            )
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
    batch, depth = path.shape
    windows = _windows(caches, n_nodes, depth)
    kinds = tuple(dict.fromkeys(windows))
    ring = next(
        n
        for n in _RINGS
        if n == _RINGS[-1] or (n + 1) * sum(k.n_bytes for k in kinds) <= _VMEM_BYTES
    )
    whole = [pl.BlockSpec(memory_space=pl.ANY)] * len(caches)
    scratch = []
    for kind in kinds:
        scratch += [pltpu.VMEM((ring, *kind.shape), kind.dtype)]
        scratch += [pltpu.VMEM(kind.words_shape, jnp.int32)]
        scratch += [pltpu.SemaphoreType.DMA((2, ring))]
    moved = sum(w.n_bytes * (w.read + w.back) // w.read for w in windows)
    return tuple(
        pl.pallas_call(
            functools.partial(_kernel, windows=windows, depth=depth, ring=ring),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(batch,),
                in_specs=whole,
                out_specs=whole,
                scratch_shapes=scratch,
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches],
            input_output_aliases={2 + i: i for i in range(len(caches))},
            compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
            cost_estimate=pl.CostEstimate(
                flops=0, transcendentals=0, bytes_accessed=batch * moved
            ),
            interpret=interpret,
            name="gather_path",
        )(start.astype(jnp.int32), path.astype(jnp.int32).reshape(-1), *caches)
    )


def _kernel(
    start_ref: Any,
    path_ref: Any,
    *refs: Any,
    windows: tuple[_Window, ...],
    depth: int,
    ring: int,
) -> None:
    """Moves the nodes of one batch row in all arrays."""
    n = len(windows)
    caches, scratch = refs[n : 2 * n], refs[2 * n :]
    kinds = tuple(dict.fromkeys(windows))
    b = pl.program_id(0)
    start = start_ref[b]
    node = lambda d: path_ref[b * depth + d]
    # Whose buffer of the ring each array takes: the arrays of a kind take turns.
    turns = [windows[:i].count(w) for i, w in enumerate(windows)]

    def parts(i):
        kind = kinds.index(windows[i])
        slot = turns[i] % ring
        buffers, words, done = scratch[3 * kind : 3 * kind + 3]
        return buffers.at[slot], words, done, slot

    def read(i):
        buffer, _, done, slot = parts(i)
        at = pl.ds(windows[i].first(start, windows[i].read), windows[i].read)
        source = caches[i].at[b, :, at]
        return pltpu.make_async_copy(source, buffer, done.at[0, slot])

    def write(i):
        buffer, _, done, slot = parts(i)
        w = windows[i]
        first = w.first(start, w.back)
        lead = pl.multiple_of(first - w.first(start, w.read), w.align)
        source = buffer.at[:, pl.ds(lead, w.back)]
        target = caches[i].at[b, :, pl.ds(first, w.back)]
        return pltpu.make_async_copy(source, target, done.at[1, slot])

    count = lambda d, n: n + (node(d) > d).astype(jnp.int32)
    n_moves = lax.fori_loop(0, depth, count, jnp.int32(0))

    @pl.when(n_moves > 0)
    def _():
        ahead = ring // 2
        busy: dict[tuple[int, int], int] = {}
        for i in range(n + ahead):
            if i < n:
                place = (kinds.index(windows[i]), turns[i] % ring)
                if place in busy:
                    write(busy[place]).wait()
                busy[place] = i
                read(i).start()
            if i >= ahead:
                j = i - ahead
                read(j).wait()
                move = _move_scales if windows[j].width is None else _move_rows
                move(*parts(j)[:2], windows[j], start, node, depth)
                write(j).start()
        for i in busy.values():
            write(i).wait()


def _move_rows(
    buffer: Any, words: Any, w: _Window, start: Array, node: Any, depth: int
) -> None:
    """Moves slots of a buffer [K, W, M], each a piece of a row of 32-bit words."""
    lead = start - w.first(start, w.read)
    n = w.per_word
    if n == 1:
        words = buffer
    else:

        @pl.loop(0, w.heads)
        def _(head):
            words[head] = pltpu.bitcast(buffer[head], jnp.int32)

    # From the top down: a node is never above its depth, so no slot that is still to
    # be read has been written.
    @pl.loop(0, depth)
    def _(d):
        source, target = lead + node(d), lead + d

        @pl.when(_is_move(source, target, w))
        def _():
            row = lambda slot: pl.ds(lax.div(slot, np.int32(n)), 1)
            piece = words[:, row(source), :]
            if n > 1:
                old = words[:, row(target), :]
                piece = _put_piece(old, piece, source, target, n)
            words[:, row(target), :] = piece

    if n > 1:
        at = pl.multiple_of(w.first(start, w.back) - w.first(start, w.read), w.align)
        narrow = pl.multiple_of(lax.div(at, np.int32(n)), _SUBLANES)

        @pl.loop(0, w.heads)
        def _(head):
            moved = words[head, pl.ds(narrow, w.back // n), :]
            buffer[head, pl.ds(at, w.back), :] = pltpu.bitcast(moved, w.dtype)


def _put_piece(old: Array, new: Array, source: Array, target: Array, n: int) -> Array:
    """Returns words with slot ``target``'s piece from slot ``source``'s; n a word."""
    bits = 8 * _WORD_BYTES // n
    shift = lambda slot: bits * lax.rem(slot, np.int32(n))
    like = lambda x: jnp.full(old.shape, x, jnp.int32)
    mask = np.int32((1 << bits) - 1)
    piece = lax.shift_right_logical(new, like(shift(source))) & like(mask)
    piece = lax.shift_left(piece, like(shift(target)))
    keep = like(~lax.shift_left(mask, shift(target)))
    return (old & keep) | piece


def _move_scales(
    buffer: Any, words: Any, w: _Window, start: Array, node: Any, depth: int
) -> None:
    """Moves slots of a buffer of scales [K, W], each a lane of 32-bit words."""
    del words
    lead = start - w.first(start, w.read)
    lane = lax.broadcasted_iota(jnp.int32, (w.heads, w.read), 1)

    def move(d, x):
        source, target = lead + node(d), lead + d
        live = _is_move(source, target, w)
        turned = pltpu.roll(x, jnp.where(live, target - source + w.read, 0), axis=1)
        return jnp.where(lane == jnp.where(live, target, -1), turned, x)

    x = pltpu.bitcast(buffer[...], jnp.int32)
    buffer[...] = pltpu.bitcast(lax.fori_loop(0, depth, move, x), w.dtype)


def _is_move(source: Array, target: Array, w: _Window) -> Array:
    """Whether a slot moves: -1 lies below, a node at its place equals its target.

    A source beyond the window is a node beyond the array, which nobody may ask for; it
    must not become an access beyond VMEM.
    """
    return (source > target) & (source < w.read)


def _windows(caches: Sequence[Any], n_nodes: int, depth: int) -> tuple[_Window, ...]:
    """Returns each array's window."""

    def window(x):
        dtype = jnp.dtype(x.dtype)
        align = _align(len(x.shape), dtype)
        heads, slots, *width = x.shape[1:]
        around = lambda n: min(_round_up(n + align - 1, align), slots)
        return _Window(
            heads=heads,
            slots=slots,
            width=width[0] if width else None,
            dtype=dtype,
            align=align,
            read=around(n_nodes),
            back=around(depth),
        )

    return tuple(window(x) for x in caches)


def _align(rank: int, dtype: jnp.dtype) -> int:
    """Returns the slots of a tile: sublanes of packed words, lanes of scales."""
    return _LANES if rank == 3 else _SUBLANES * _WORD_BYTES // dtype.itemsize


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
