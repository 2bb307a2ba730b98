"""How a pass is cut into tiles and steps for the TPU kernel."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from specjax.typing import Array

#: Cache slots of a block.
BLOCK = 256

# Query rows of a tile. More of them would compute as much again for a pass of few
# tokens; fewer would leave most of a product to loading the block into the MXU.
_TILE = 32

# Query heads may be more than a tile has rows; then a tile is one token.
_SUBLANES = 16
LANES = 128
WORD_BITS = 32

# Blocks of so many heads are one transfer; smaller ones would wait for memory's
# latency, larger ones would gain nothing.
_MOST_HEADS = 8
_MOST_TILES = 8

# Rows of a tree pass: their marks are words of 32 bits in one vector register's lanes.
MOST_NODES = 256

# What a step may hold of VMEM, beside what the compiler spills; its own limit is 16 MiB
# on v5e. Llama-3-8B in bfloat16 takes 3 MiB for 8 new tokens and 9 for 256.
VMEM_BYTES = 10 * 2**20


class Pass(NamedTuple):
    """What is static of a pass.

    Attributes:
      n_rows: batch rows of the pass, R.
      n_new: new tokens, T.
      n_kv: key/value heads, K.
      group: query heads of a key/value head.
      width: of a head, M.
      dtype: of the cache.
      operand: type of what the products take.
      scaled: whether the cache has scales.
      n_words: 32-bit words of a row's marks of a tree; 0 for a chain.
      scale: factor on the scores.
      window: sliding window, or None.
      sinks: first tokens that are seen besides it.
      soft_cap: of the scores, or None.
      heads: key/value heads of a step.
      tiles: tiles of a step.
    """

    n_rows: int
    n_new: int
    n_kv: int
    group: int
    width: int
    dtype: jnp.dtype
    operand: jnp.dtype
    scaled: bool
    n_words: int
    scale: float
    window: int | None
    sinks: int
    soft_cap: float | None
    heads: int = 1
    tiles: int = 1

    @property
    def turned(self) -> bool:
        """Whether blocks are [M, BLOCK]: XLA stores narrow heads with slots last.

        A row of 64 numbers would leave half of a register's lanes empty. In the other
        layout each call would begin with a copy of the cache.
        """
        return self.width % LANES != 0

    @property
    def tokens(self) -> int:
        """New tokens of a tile."""
        return max(1, _TILE // self.group)

    @property
    def rows(self) -> int:
        """Query rows of a tile, padding included."""
        return _round_up(self.tokens * self.group, _SUBLANES)

    @property
    def n_tiles(self) -> int:
        """Tiles of a pass that have a row."""
        return -(-self.n_new // self.tokens)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Rows, groups of heads, groups of tiles."""
        return self.n_rows, self.n_kv // self.heads, -(-self.n_tiles // self.tiles)

    @property
    def n_bytes(self) -> int:
        """VMEM of a step."""
        width, lane_bytes = _round_up(self.width, LANES), 4 * LANES
        stored = self.width if self.turned else width
        block = BLOCK * stored * self.dtype.itemsize + (4 * BLOCK if self.scaled else 0)
        # Queries, results and the rows' marks are held twice, by the grid's pipeline.
        row = width * self.operand.itemsize * 2 + width * 4 * 2 + lane_bytes * 2
        rows = self.tiles * self.rows
        return self.heads * (4 * block + rows * row) + rows * lane_bytes * 2


def tree_marks(mask: Array, offsets: Array, length: Array, p: Pass) -> Array:
    """Packs offsets and what rows see of each other. int32 [R, T, 1 + words]."""
    offsets = offsets.astype(jnp.int32)
    named = mask.astype(bool)
    if p.window is not None:
        near = offsets[:, :, None] - offsets[:, None, :] < p.window
        stands = length[:, None] + offsets
        named = named & (near | (stands < p.sinks)[:, None, :])
    pad = p.n_words * WORD_BITS - p.n_new
    named = jnp.pad(named, ((0, 0), (0, 0), (0, pad)))
    named = named.reshape(*named.shape[:2], p.n_words, WORD_BITS).astype(jnp.uint32)
    words = jnp.sum(named << jnp.arange(WORD_BITS, dtype=jnp.uint32), -1, jnp.uint32)
    words = lax.bitcast_convert_type(words, jnp.int32)
    return jnp.concatenate([offsets[:, :, None], words], axis=2)


def tiled(x: Array, p: Pass) -> Array:
    """Cuts [R, T, K, G or 1, X] into tiles. [R, K, tiles of all steps, rows, X]."""
    n_rows, _, n_kv, _, width = x.shape
    n_tiles = p.grid[2] * p.tiles
    x = jnp.broadcast_to(x, (n_rows, p.n_new, n_kv, p.group, width))
    pad = n_tiles * p.tokens - p.n_new
    x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0), (0, 0)))
    x = x.transpose(0, 2, 1, 3, 4)
    x = x.reshape(n_rows, n_kv, n_tiles, p.tokens * p.group, width)
    pad = p.rows - p.tokens * p.group
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, pad), (0, 0)))


def untiled(x: Array, p: Pass) -> Array:
    """Undoes ``tiled``. [R, T, H, M]."""
    x = x[:, :, :, : p.tokens * p.group]
    x = x.reshape(p.n_rows, p.n_kv, -1, p.group, p.width)[:, :, : p.n_new]
    x = x.transpose(0, 2, 1, 3, 4)
    return x.reshape(p.n_rows, p.n_new, p.n_kv * p.group, p.width)


def pass_of(q: Any, keys: Any, tree: bool, scaled: bool) -> Pass:
    """Describes a pass by its arrays; see ``Pass``."""
    n_rows, n_new, n_heads, width = q.shape
    n_kv, dtype = keys.shape[1], jnp.dtype(keys.dtype)
    exact = jnp.float32 in (jnp.dtype(q.dtype), dtype)
    return Pass(
        n_rows=n_rows,
        n_new=n_new,
        n_kv=n_kv,
        group=n_heads // n_kv,
        width=width,
        dtype=dtype,
        operand=jnp.dtype(jnp.float32 if exact else jnp.bfloat16),
        scaled=scaled,
        n_words=-(-n_new // WORD_BITS) if tree else 0,
        scale=1.0,
        window=None,
        sinks=0,
        soft_cap=None,
    )


def sized(p: Pass) -> Pass | None:
    """Picks heads and tiles of a step; None: not even one of each fits."""
    # Scales [K, S] are stored in tiles of 8 heads, which a transfer can't cut.
    whole = lambda n: not p.scaled or n == p.n_kv or n % 8 == 0
    heads = [
        n
        for n in range(1, p.n_kv + 1)
        if p.n_kv % n == 0 and whole(n) and (n <= _MOST_HEADS or p.scaled)
    ]
    # Tiles are spread over steps evenly.
    n_steps = [-(-p.n_tiles // n) for n in range(1, _MOST_TILES + 1)]
    tiles = sorted({-(-p.n_tiles // n) for n in n_steps})
    sizes = [p._replace(heads=n, tiles=t) for n in heads for t in tiles]
    sizes = [x for x in sizes if x.n_bytes <= VMEM_BYTES]
    # The blocks are read anew for each group of tiles, but from four tiles on a step
    # computes longer than it reads.
    rank = lambda x: (min(x.tiles, 4), min(x.heads, _MOST_HEADS), x.tiles, -x.heads)
    return max(sizes, key=rank, default=None)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
