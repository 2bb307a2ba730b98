"""Writing a pass's keys and values on TPU: both arrays of a layer in one call.

A memory transfer moves whole tiles of slots (8 rows of 32 bits, so 16 bfloat16 or 32
8-bit slots), and a pass begins at any slot. So the tiles around the pass's slots are
read into VMEM, the new rows are turned to their place and merged in as pieces of 32-bit
words, and the tiles are written back; what else is in them goes back bit for bit.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.typing import Array, Float, Int

_LANES = 128
_LANES = 128
_SUBLANES = 8
_WORD_BYTES = 4

# What a step may hold of VMEM; the compiler's own limit is 16 MiB on v5e.
_VMEM_BYTES = 12 * 2**20


class _Window(NamedTuple):
    """The slots that are transferred of one batch row.

    Attributes:
      heads: K.
      slots: of the array, S.
      width: of a head, M.
      dtype: of the array.
      n_new: rows of the pass, T.
    """

    heads: int
    slots: int
    width: int
    dtype: jnp.dtype
    n_new: int

    @property
    def align(self) -> int:
        """Slots of a tile."""
        return _SUBLANES * _WORD_BYTES // self.dtype.itemsize

    @property
    def size(self) -> int:
        """Slots transferred: whole tiles around the pass's slots."""
        return min(_round_up(self.n_new + self.align - 1, self.align), self.slots)

    @property
    def n_bytes(self) -> int:
        """Of one batch row in VMEM, padding included."""
        lanes = _round_up(self.width, _LANES)
        return self.heads * self.size * lanes * self.dtype.itemsize

    def first(self, start: Array) -> Array:
        """First slot of whole tiles around ``start``, inside the array."""
        tile = lax.bitwise_and(start, np.int32(-self.align))
        return pl.multiple_of(jnp.minimum(tile, self.slots - self.size), self.align)


def supports(cache: Any, *, n_new: int) -> str | None:
    """Says why the kernel can't write such rows.

    Args:
      cache: array [B, K, S, M]; shape and dtype are looked at.
      n_new: rows of the pass, T.

    Returns:
      None if it can, else the reason.
    """
    dtype = jnp.dtype(cache.dtype)
    if dtype.itemsize not in (1, 2, 4):
        return f"a cache of {dtype} has no 8, 16 or 32 bits a number"
    w = _window(cache, n_new)
    if w.slots % w.align:
        return f"{w.slots} slots of {dtype} are no multiple of {w.align}"
    if _step_bytes(w) > _VMEM_BYTES:
        return (
            f"{n_new} rows need {_step_bytes(w) / 2**20:.0f} MiB of VMEM, more than "
            f"{_VMEM_BYTES / 2**20:.0f}; write fewer at a time"
        )
    if (width := cache.shape[3]) % _LANES:
        # XLA keeps such arrays with the slots last.
        return f"heads of {width} are no multiple of {_LANES}: XLA would copy the cache"
    return None


def write_rows(
    keys: Float[Array, "B K S M"],
    values: Float[Array, "B K S M"],
    new_keys: Float[Array, "R T K M"],
    new_values: Float[Array, "R T K M"],
    start: Int[Array, " R"],
    rows: Int[Array, " R"] | None = None,
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Writes row r of a pass to slots ``[start[r], start[r] + T)``, in place.

    Args:
      keys: cache; donate it, else it is copied.
      values: likewise, of the same shape and dtype.
      new_keys: rows to write, cast to the cache's dtype.
      new_values: likewise.
      start: first slot of each row; the slots are inside the array.
      rows: batch row that each row goes to; None: row r to batch row r.
      interpret: as in ``pallas_call``.

    Returns:
      The caches; all other slots are as they were.
    """
    n_rows, n_new = new_keys.shape[:2]
    w = _window(keys, n_new)
    fits = _VMEM_BYTES // _step_bytes(w)
    chunk = max(n for n in range(1, n_rows + 1) if n_rows % n == 0 and n <= fits)
    pad = ((0, 0), (0, 0), (0, w.size - n_new), (0, 0))
    arranged = lambda x: jnp.pad(x.astype(w.dtype).transpose(0, 2, 1, 3), pad)
    place = jnp.arange(n_rows, dtype=jnp.int32) if rows is None else rows
    block = (chunk, w.heads, w.size, w.width)
    new = pl.BlockSpec(block, lambda i, *_: (i, 0, 0, 0))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    like = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    written = pl.pallas_call(
        functools.partial(_kernel, w=w, chunk=chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(n_rows // chunk,),
            in_specs=[new, new, whole, whole],
            out_specs=[whole, whole],
            scratch_shapes=[
                pltpu.VMEM((2, *block), w.dtype),
                pltpu.SemaphoreType.DMA((2, chunk)),
            ],
        ),
        out_shape=[like, like],
        input_output_aliases={4: 0, 5: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=6 * n_rows * w.n_bytes
        ),
        interpret=interpret,
        name="write_rows",
    )(
        start.astype(jnp.int32),
        place.astype(jnp.int32),
        arranged(new_keys),
        arranged(new_values),
        keys,
        values,
    )
    return written[0], written[1]


def _kernel(
    start_ref: Any,
    row_ref: Any,
    new_keys: Any,
    new_values: Any,
    keys_in: Any,
    values_in: Any,
    keys: Any,
    values: Any,
    buffer: Any,
    done: Any,
    *,
    w: _Window,
    chunk: int,
) -> None:
    """Writes a chunk of rows."""
    del keys_in, values_in
    base = pl.program_id(0) * chunk
    pairs = ((0, keys, new_keys), (1, values, new_values))

    def slots(cache, i):
        first = w.first(start_ref[base + i])
        return cache.at[row_ref[base + i], :, pl.ds(first, w.size)]

    def read(which, cache, i):
        return pltpu.make_async_copy(
            slots(cache, i), buffer.at[which, i], done.at[0, i]
        )

    def write(which, cache, i):
        return pltpu.make_async_copy(
            buffer.at[which, i], slots(cache, i), done.at[1, i]
        )

    @pl.loop(0, chunk)
    def _(i):
        for which, cache, _ in pairs:
            read(which, cache, i).start()

    @pl.loop(0, chunk)
    def _(i):
        for which, cache, _ in pairs:
            read(which, cache, i).wait()
        start = start_ref[base + i]
        for which, cache, new in pairs:
            _merge(buffer.at[which, i], new.at[i], start - w.first(start), w)
            write(which, cache, i).start()

    @pl.loop(0, chunk)
    def _(i):
        for which, cache, _ in pairs:
            write(which, cache, i).wait()


def _merge(buffer: Any, new: Any, lead: Array, w: _Window) -> None:
    """Puts rows [0, T) of ``new`` [K, W, M] at rows [lead, lead + T) of a buffer."""
    per_word = _WORD_BYTES // w.dtype.itemsize
    bits = 8 * w.dtype.itemsize
    shape = (w.size // per_word, w.width)
    like = lambda x: jnp.full(shape, x, jnp.int32)
    word = lax.broadcasted_iota(jnp.int32, shape, 0)
    live = jnp.zeros(shape, jnp.int32)
    for piece in range(per_word):
        slot = word * per_word + piece
        mask = np.uint32((2**bits - 1) << (bits * piece)).astype(np.int32)
        inside = (slot >= lead) & (slot < lead + w.n_new)
        live |= jnp.where(inside, mask, 0)

    @pl.loop(0, w.heads)
    def _(head):
        x = pltpu.bitcast(new[head], jnp.int32)
        x = pltpu.roll(x, lax.div(lead, np.int32(per_word)), axis=0)
        if per_word > 1:
            # Pieces move up by less than a word, out of the word before too. A shift
            # by all 32 bits has no meaning, hence the two steps.
            shift = bits * lax.rem(lead, np.int32(per_word))
            before = lax.shift_right_logical(pltpu.roll(x, 1, axis=0), like(1))
            before = lax.shift_right_logical(before, like(31 - shift))
            x = lax.shift_left(x, like(shift)) | before
        old = pltpu.bitcast(buffer[head], jnp.int32)
        buffer[head] = pltpu.bitcast((old & ~live) | (x & live), w.dtype)


def _window(cache: Any, n_new: int) -> _Window:
    _, heads, slots, width = cache.shape
    return _Window(heads, slots, width, jnp.dtype(cache.dtype), n_new)


def _step_bytes(w: _Window) -> int:
    """VMEM of a row: the tiles, and the new rows twice, for keys and values."""
    return 6 * w.n_bytes


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
