"""Verification and sampling of a pass on GPU (Mosaic GPU).

A block takes one row of the pass: its filters, its test and its draw. What is left,
the first row that fails, is a reduction over a few numbers.

A row of 128256 logits does not fit in shared memory, so each step is a sweep over it
where it lies, in the second-level cache after the first: 16 for a filter that is on
(bisection on the bits of the threshold, three thresholds a sweep), 2 and a part of
one for a draw. What a filter keeps is the front of the row in the order of scores
and indices, hence a pair (least score, last index at it) and no array. No sum is ever
compared with one that was added in another order, so what is bisected truly grows.

Longer than other files: one kernel, whose parts share its row layout and helpers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.typing import Array, Float, Int

# Elements that the 128 threads of a block load with one instruction each for four, and
# how many such loads are on their way at a time.
_PIECE = 1024
_N_PIECES = 8
_CHUNK = _PIECE * _N_PIECES
_VECTOR = 4
_THREADS = 128

# Tokens of a column of the two-stage Gumbel draw; part of that draw's definition.
_COLUMN = 256

# Loads on their way while columns are walked down.
_UNROLL = 8

# An index that no token has. Indices are reduced as float32, exact to 2**24.
_NOWHERE = float(2**24)

# The key (see ``_key``) of -inf.
_LEAST_KEY = int(np.uint32(0x807FFFFF).astype(np.int32))

# The float32 before 1; a float32 times this is the one before it.
_BELOW_ONE = 1 - 2.0**-24

_MERGE: dict[str, tuple[Callable[..., Array], Callable[..., Array], float]] = {
    "sum": (jnp.add, jnp.sum, 0.0),
    "max": (jnp.maximum, jnp.max, -np.inf),
    "min": (jnp.minimum, jnp.min, np.inf),
}

Rule = Literal["greedy", "coupled", "rejection"]
_Part = tuple[str, Callable[..., Array]]


def supports(
    logits: Any, *, n_drafts: int, rule: str, logprobs: Any = None
) -> str | None:
    """Says why the kernel can't take such a pass.

    Args:
      logits: of the pass, [B, N+1, V]; its shape and dtype are looked at.
      n_drafts: N.
      rule: of the registry.
      logprobs: the drafts' law, or None.

    Returns:
      None if it can, else the reason.
    """
    del n_drafts
    vocab = logits.shape[-1]
    if rule not in ("greedy", "coupled", "rejection"):
        return f"{rule=} has no kernel; use greedy, coupled or rejection"
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits are {logits.dtype}; they must be float32 or bfloat16"
    if logprobs is not None and logprobs.dtype != jnp.float32:
        return f"draft log-probabilities are {logprobs.dtype}; they must be float32"
    if not _COLUMN < vocab <= 2**24:
        return f"a vocabulary of {vocab} is not in ({_COLUMN}, {2**24}]"
    return None


def verify_sample(
    logits: Float[Array, "B N1 V"],
    tokens: Int[Array, "B N"],
    n_valid: Int[Array, " B"],
    *,
    rule: Rule,
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    logprobs: Float[Array, "B N V"] | None = None,
    accept: Float[Array, "B N"] | None = None,
    draw: Float[Array, " B"] | None = None,
    gumbel: Float[Array, "B N1 Z"] | None = None,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Verifies drafts and draws what follows; see ``specjax.ops.verify_sample``.

    Rows whose length is no multiple of 128 are padded, which copies them; for
    ``coupled`` also those that are no whole number of columns.

    Args:
      logits: float32 or bfloat16, natural log scale.
      tokens: drafts, ids inside the vocabulary.
      n_valid: drafts of each row that count, in [0, N].
      rule: which decides.
      temperature: of each row; 0 is the argmax.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      logprobs: the law of the drafts, looked at by ``rejection``; None: point masses.
      accept: uniform numbers for ``rejection``.
      draw: likewise.
      gumbel: noise for ``coupled``.
      interpret: as in ``plgpu.kernel``.

    Returns:
      Accepted drafts [B], the next token [B], and the log-normaliser of each row of
      logits [B, N+1].
    """
    batch, width, vocab = logits.shape
    n_drafts = width - 1
    drawn = logprobs is not None and rule == "rejection" and n_drafts > 0
    shape = _Pass(rule, vocab, n_drafts, drawn)
    to = lambda x, size: jnp.pad(
        x, ((0, 0), (0, 0), (0, size - x.shape[-1])), constant_values=-jnp.inf
    )
    last = lambda x: jnp.pad(x, ((0, 0), (0, 1)))
    inputs = {
        "temperature": temperature.astype(jnp.float32),
        "top_k": top_k.astype(jnp.int32),
        "top_p": top_p.astype(jnp.float32),
        "log_min_p": jnp.log(min_p.astype(jnp.float32)),
        "n_valid": n_valid.astype(jnp.int32),
        "tokens": last(tokens.astype(jnp.int32)),
        "logits": to(logits, shape.padded),
    }
    if rule == "rejection":
        assert accept is not None and draw is not None
        inputs |= {"accept": last(accept[:, :n_drafts]), "draw": draw}
    elif rule == "coupled":
        assert gumbel is not None
        n = shape.n_columns
        columns = to(gumbel[..., :n], _round_up(n, _THREADS))
        inputs |= {"columns": columns, "lanes": gumbel[..., n:]}
    if drawn:
        inputs["law"] = to(logprobs, shape.padded)
    outputs = {
        "choice": jax.ShapeDtypeStruct((batch, width), jnp.int32),
        "passed": jax.ShapeDtypeStruct((batch, width), jnp.int32),
        "log_normalizer": jax.ShapeDtypeStruct((batch, width), jnp.float32),
    }
    choice, passed, log_normalizer = plgpu.kernel(
        functools.partial(_kernel, shape=shape, names=(*inputs, *outputs)),
        out_type=tuple(outputs.values()),
        grid=(batch, width),
        grid_names=("batch", "row"),
        interpret=interpret,
        kernel_name=f"verify_sample_{rule}",
    )(*inputs.values())
    n_accepted = jnp.sum(jnp.cumprod(passed[:, :n_drafts], axis=1), axis=1)
    next_token = jnp.take_along_axis(choice, n_accepted[:, None], axis=1)[:, 0]
    return n_accepted, next_token, log_normalizer


class _Pass(NamedTuple):
    """What is static of a pass.

    Attributes:
      rule: as in the registry of rules.
      vocab: V.
      n_drafts: N.
      drawn: whether the drafts come with the law they were drawn from.
    """

    rule: Rule
    vocab: int
    n_drafts: int
    drawn: bool

    @property
    def n_columns(self) -> int:
        """Columns of the two-stage Gumbel draw."""
        return -(-self.vocab // _COLUMN)

    @property
    def size(self) -> int:
        """Length of a row that sweeps go over."""
        return max(_round_up(self.vocab, _THREADS), _CHUNK)

    @property
    def padded(self) -> int:
        """Length of a row in memory: the last window of a draw fits in."""
        if self.rule != "coupled":
            return self.size
        window = _round_up(self.n_columns, _THREADS)
        needed = (_COLUMN - 1) * self.n_columns + window
        return max(self.size, _round_up(needed, _THREADS))

    @property
    def n_chunks(self) -> int:
        """Steps of a sweep."""
        return -(-self.size // _CHUNK)


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a pass.

    Attributes:
      refs: the kernel's references by name.
      shape: of the pass.
      b: batch row.
      i: row of the pass.
      temperature: divides the scores.
    """

    refs: dict[str, Any]
    shape: _Pass
    b: Array
    i: Array
    temperature: Any

    def logits(self, start: Array, size: int, vector: int) -> Array:
        """Reads logits, float32."""
        layout = _layout(size, vector)
        at = self.refs["logits"].at[self.b, self.i, pl.ds(start, size)]
        x = plgpu.load(at, layout=layout, optimized=False)
        return x.astype(jnp.float32)

    def chunk(self, c: Array, law: bool = False) -> list[tuple[Array, ...]]:
        """Reads a step of a sweep: (score, index) or (score, index, draft's law).

        The last step goes back as far as it must to end with the row, and what was
        seen before is -inf there.
        """
        start = jnp.minimum(c * _CHUNK, self.shape.size - _CHUNK)
        starts = [start + k * _PIECE for k in range(_N_PIECES)]
        pieces = [self.logits(at, _PIECE, _VECTOR) for at in starts]
        laws: list[Array] = []
        if law:
            i = jnp.minimum(self.i, self.shape.n_drafts - 1)
            laws = [
                plgpu.load(
                    self.refs["law"].at[self.b, i, pl.ds(at, _PIECE)],
                    layout=_layout(_PIECE, _VECTOR),
                    optimized=False,
                )
                for at in starts
            ]
        found = []
        for k, x in enumerate(pieces):
            index = starts[k] + _iota(_PIECE, _VECTOR)
            new = index >= c * _CHUNK
            mask = lambda y, new=new: jnp.where(new, y, -jnp.inf)
            score = mask(x) / self.temperature
            found.append((score, index, *(mask(y) for y in laws[k : k + 1])))
        return found

    def sweep(self, *parts: _Part, law: bool = False) -> tuple[Array, ...]:
        """Reduces functions of (score, index[, law]) over the row in one sweep.

        Args:
          *parts: how to reduce (``sum``, ``max``, ``min``), and the function.
          law: whether the functions look at the draft's law.

        Returns:
          The reductions, scalars.
        """

        def step(c: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            for piece in self.chunk(c, law):
                totals = tuple(
                    _MERGE[kind][0](total, value(*piece))
                    for (kind, value), total in zip(parts, totals, strict=True)
                )
            return totals

        first = tuple(_full(_PIECE, _VECTOR, _MERGE[kind][2]) for kind, _ in parts)
        totals = lax.fori_loop(0, self.shape.n_chunks, step, first)
        return tuple(
            _MERGE[kind][1](total)
            for (kind, _), total in zip(parts, totals, strict=True)
        )


class _Kept(NamedTuple):
    """The front of a row in the order of falling scores, then rising indices.

    Attributes:
      least: the smallest score kept.
      end: the last index kept of those that have it.
    """

    least: Array
    end: Array

    def has(self, x: Array, v: Array) -> Array:
        """Says which scores x with indices v are kept."""
        return (x > self.least) | ((x == self.least) & (v <= self.end))

    def within(self, other: "_Kept") -> "_Kept":
        """Returns the shorter of two fronts."""
        least = jnp.maximum(self.least, other.least)
        mine = jnp.where(self.least == least, self.end, _LAST)
        theirs = jnp.where(other.least == least, other.end, _LAST)
        return _Kept(least, jnp.minimum(mine, theirs))


_LAST = 2**30


def _kernel(*refs: Any, shape: _Pass, names: tuple[str, ...]) -> None:
    """Decides one row of the pass."""
    r = dict(zip(names, refs, strict=True))
    b, i = lax.axis_index("batch"), lax.axis_index("row")
    top, best = _argmax_and_normalizer(_Row(r, shape, b, i, jnp.float32(1.0)))
    token = r["tokens"][b, i]
    choice, chance = best, jnp.where(token == best, 1.0, 0.0)
    temperature = r["temperature"][b]

    if shape.rule != "greedy":
        sampled = functools.partial(_sample, r, shape, b, i, top, token)
        choice, chance = lax.cond(temperature > 0, sampled, lambda: (choice, chance))

    if shape.rule == "rejection":
        q = jnp.float32(1.0)
        if shape.drawn:
            at = jnp.minimum(i, shape.n_drafts - 1)
            q = jnp.exp(r["law"][b, at, token])
        passed = r["accept"][b, i] * q < chance
    else:
        passed = token == choice
    passed &= i < r["n_valid"][b]
    r["choice"][b, i] = choice
    r["passed"][b, i] = passed.astype(jnp.int32)


def _argmax_and_normalizer(row: _Row) -> tuple[Array, Array]:
    """Writes the log-normaliser; returns the maximum and its lowest index.

    The maximum of a row that holds NaN is NaN, its index 0.
    """
    top, n_nan = row.sweep(
        ("max", lambda x, _: x),
        ("sum", lambda x, _: jnp.where(x != x, 1.0, 0.0)),
    )
    top = jnp.where(n_nan > 0, jnp.nan, top)
    shift = jnp.where(_is_finite(top), top, 0.0)
    total, best = row.sweep(
        ("sum", lambda x, _: jnp.exp(x - shift)),
        ("min", lambda x, v: jnp.where(x == top, v.astype(jnp.float32), _NOWHERE)),
    )
    normalizer = jnp.where(n_nan > 0, jnp.nan, jnp.log(total) + shift)
    row.refs["log_normalizer"][row.b, row.i] = normalizer
    best = jnp.where(best < row.shape.vocab, best, 0.0)
    return top, best.astype(jnp.int32)


def _sample(
    r: dict[str, Any], shape: _Pass, b: Array, i: Array, top: Array, token: Array
) -> tuple[Array, Array]:
    """Draws the token after a row, and reads the draft's probability.

    Args:
      r: references.
      shape: of the pass.
      b: batch row.
      i: row of the pass.
      top: the largest logit.
      token: the draft after the row; 0 where there is none.

    Returns:
      The token and the probability. Of a row without a law the token is 0, and the
      probability one that no test passes.
    """
    temperature = r["temperature"][b]
    row = _Row(r, shape, b, i, temperature)
    top = top / temperature
    kept = _filter(row, top)
    if shape.rule == "coupled":
        choice, chance = _draw_gumbel(row, kept), jnp.float32(0.0)
    else:
        choice, chance = _draw_uniform(row, kept, top, token)
    sound = _is_finite(top)
    return jnp.where(sound, choice, 0), jnp.where(sound, chance, -1.0)


def _filter(row: _Row, top: Array) -> _Kept:
    """Finds what top-k, top-p and min-p, in this order, keep of a row."""
    r, b = row.refs, row.b
    kept = _Kept(jnp.float32(-jnp.inf), jnp.int32(_LAST))
    weight = lambda x: jnp.exp(x - top)

    def first_k() -> _Kept:
        goal = r["top_k"][b].astype(jnp.float32)
        return _keep_largest(row, kept, top, lambda x: 1.0, goal)

    on = (r["top_k"][b] > 0) & (r["top_k"][b] < row.shape.vocab)
    kept = _Kept(*lax.cond(on, first_k, lambda: kept))

    def nucleus(least: Array, end: Array) -> _Kept:
        before = _Kept(least, end)
        value = lambda x, v: jnp.where(before.has(x, v), weight(x), 0.0)
        (total,) = row.sweep(("sum", value))
        goal = jnp.maximum(r["top_p"][b] * total, float(np.finfo(np.float32).tiny))
        return _keep_largest(row, before, top, weight, goal)

    kept = _Kept(
        *lax.cond(r["top_p"][b] < 1, nucleus, lambda *same: _Kept(*same), *kept)
    )
    return kept.within(_Kept(top + r["log_min_p"][b], jnp.int32(_LAST)))


def _keep_largest(
    row: _Row,
    kept: _Kept,
    top: Array,
    weight: Callable[[Array], Array | float],
    goal: Array,
) -> _Kept:
    """Keeps the smallest front whose weights reach the goal.

    Args:
      row: the row.
      kept: what is left of it.
      top: its largest score.
      weight: non-negative, of each score.
      goal: above 0.

    Returns:
      What is kept now, nothing that was not.
    """

    def mass(test: Callable[[Array], Array]) -> _Part:
        return "sum", lambda x, v: jnp.where(test(x) & kept.has(x, v), weight(x), 0.0)

    def quarter(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        second = _between(low, high)
        keys = (_between(low, second), second, _between(second, high))
        at_least = lambda t: lambda x: x >= t
        masses = row.sweep(*(mass(at_least(_scores(key))) for key in keys))
        for key, found in zip(keys, masses, strict=True):
            reaches = found >= goal
            # Keys rise: the last that reaches is the lower bound, the first that
            # does not the upper one.
            high = jnp.where(
                reaches, high, jnp.minimum(high, jnp.maximum(key, low + 1))
            )
            low = jnp.where(reaches, jnp.maximum(low, key), low)
        return low, high

    first = (jnp.int32(_LEAST_KEY), _key(top) + 1)
    least = jnp.max(_scores(lax.fori_loop(0, 16, quarter, first)[0]))

    ties = lambda x, v: (x == least) & kept.has(x, v)
    above, n_ties = row.sweep(
        mass(lambda x: x > least),
        ("sum", lambda x, v: jnp.where(ties(x, v), 1.0, 0.0)),
    )
    tie_weight = jnp.float32(weight(least))
    wanted = (goal - above) / jnp.where(tie_weight > 0, tie_weight, 1.0)
    wanted = jnp.minimum(jnp.maximum(wanted, 1.0), n_ties)
    whole = wanted.astype(jnp.int32).astype(jnp.float32)
    wanted = jnp.where(whole < wanted, whole + 1.0, whole)

    def in_part() -> Array:
        def reaches(end: Array) -> Array:
            up_to = lambda x, v: jnp.where(ties(x, v) & (v <= end), 1.0, 0.0)
            return row.sweep(("sum", up_to))[0] >= wanted

        low, high = jnp.int32(-1), jnp.int32(row.shape.vocab - 1)
        return _first_index(reaches, low, high, row.shape.vocab.bit_length())

    end = lax.cond(wanted < n_ties, in_part, lambda: jnp.int32(_LAST))
    return kept.within(_Kept(least, end))


def _draw_uniform(
    row: _Row, kept: _Kept, top: Array, token: Array
) -> tuple[Array, Array]:
    """Draws a token by inverting a sum, and reads the draft's probability.

    Where a draft stands after the row, the draw is from what the draft's law leaves of
    the target's: the token is used only if the draft was rejected.
    """
    r, shape, b, i = row.refs, row.shape, row.b, row.i
    mass = lambda x, v: jnp.where(kept.has(x, v), jnp.exp(x - top), 0.0)
    (normalizer,) = row.sweep(("sum", mass))
    p = lambda x, v: mass(x, v) / normalizer
    of_draft = r["logits"][b, i, token].astype(jnp.float32) / row.temperature
    chance = p(of_draft, token)
    if shape.drawn:
        rest = lambda x, v, q: jnp.maximum(p(x, v) - jnp.exp(q), 0.0)
    else:
        # What a point mass leaves has nothing of the draft itself.
        rest = lambda x, v: jnp.where(v == token, 0.0, p(x, v))
    (left,) = row.sweep(("sum", rest), law=shape.drawn)
    # Rounding can leave nothing although a rejection happened: then p equals q to
    # rounding, and p is the right law.
    use = (i < r["n_valid"][b]) & (left > 0)
    share = jnp.where(use, 1.0, 0.0)

    def weights(c: Array, end: Array) -> Array:
        """Sums the weights of a step up to an index."""
        total = _full(_PIECE, _VECTOR, 0.0)
        for piece in row.chunk(c, shape.drawn):
            x, v = piece[:2]
            value = jnp.where(_spread(share) > 0, rest(*piece), p(x, v))
            total += jnp.where(v <= end, value, 0.0)
        return jnp.sum(total)

    whole = jnp.int32(_LAST)
    add = lambda c, running: running + weights(c, whole)
    total = lax.fori_loop(0, shape.n_chunks, add, jnp.float32(0.0))
    # A rounded-up product could reach the total itself; then no index exceeds it.
    goal = jnp.minimum(r["draw"][b] * total, total * _BELOW_ONE)

    def find(c: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        running, base, at = state
        after = running + weights(c, whole)
        hit = (at < 0) & (after > goal)
        base = jnp.where(hit, running, base)
        return after, base, jnp.where(hit, c, at)

    start = (jnp.float32(0.0), jnp.float32(0.0), jnp.int32(-1))
    _, base, c = lax.fori_loop(0, shape.n_chunks, find, start)
    c = jnp.maximum(c, 0)  # of a row without a law
    reaches = lambda end: base + weights(c, end) > goal
    low = c * _CHUNK - 1
    high = jnp.minimum(low + _CHUNK, shape.vocab - 1)
    return _first_index(reaches, low, high, _CHUNK.bit_length()), chance


def _draw_gumbel(row: _Row, kept: _Kept) -> Array:
    """Draws a token: first a column of 256, then one of its tokens."""
    r, b, i = row.refs, row.b, row.i
    n_columns = row.shape.n_columns
    size = _round_up(n_columns, _THREADS)

    def tokens(j: Array) -> Array:
        """Reads the j-th token of every column."""
        x = row.logits(j * n_columns, size, 1) / row.temperature
        return jnp.where(kept.has(x, j * n_columns + _iota(size, 1)), x, -jnp.inf)

    def over(step: Callable[[Array, Array], Array], start: float) -> Array:
        def some(k: Array, total: Array) -> Array:
            for x in [tokens(k * _UNROLL + u) for u in range(_UNROLL)]:
                total = step(total, x)
            return total

        return lax.fori_loop(0, _COLUMN // _UNROLL, some, _full(size, 1, start))

    top = over(jnp.maximum, -np.inf)
    shift = jnp.where(top > -jnp.inf, top, 0.0)
    mass = over(lambda total, x: total + jnp.exp(x - shift), 0.0)
    noise = plgpu.load(r["columns"].at[b, i], layout=_layout(size, 1), optimized=False)
    perturbed = jnp.log(mass) + shift + noise
    best = jnp.max(perturbed)
    number = _iota(size, 1).astype(jnp.float32)
    column = jnp.min(jnp.where(perturbed == best, number, _NOWHERE))
    column = jnp.where(column < n_columns, column, 0.0).astype(jnp.int32)

    def better(k: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        best, lane = state
        for j in [k * _UNROLL + u for u in range(_UNROLL)]:
            v = j * n_columns + column
            x = r["logits"][b, i, v].astype(jnp.float32) / row.temperature
            x = jnp.where(kept.has(x, v), x, -jnp.inf) + r["lanes"][b, i, j]
            lane = jnp.where(x > best, j, lane)
            best = jnp.maximum(x, best)
        return best, lane

    first = (jnp.float32(-jnp.inf), jnp.int32(0))
    _, lane = lax.fori_loop(0, _COLUMN // _UNROLL, better, first)
    return lane * n_columns + column


def _first_index(
    reaches: Callable[[Array], Array], low: Array, high: Array, n_halvings: int
) -> Array:
    """Finds the lowest index in (low, high] at which a rising test is true.

    Args:
      reaches: the test, true at high.
      low: where it is false, or -1.
      high: where it is true.
      n_halvings: enough of them.

    Returns:
      The index.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) >> 1
        reached = reaches(middle) & (middle > low)
        return jnp.where(reached, low, middle), jnp.where(reached, middle, high)

    return lax.fori_loop(0, n_halvings, halve, (low, high))[1]


def _between(low: Array, high: Array) -> Array:
    """Returns the midpoint without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


def _key(x: Array) -> Array:
    """Maps float32 to int32 so that the order is kept (-0 and +0 together)."""
    # Scalars have no bit casts on this backend, so a piece of them is cast.
    zeroed = _spread(jnp.where(x == 0, 0.0, x))
    bits = lax.bitcast_convert_type(zeroed, jnp.int32)
    return jnp.max(bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF)))


def _scores(key: Array) -> Array:
    """Maps a key back to float32, a piece of it."""
    bits = key ^ ((key >> 31) & jnp.int32(0x7FFFFFFF))
    return lax.bitcast_convert_type(_spread(bits), jnp.float32)


def _spread(x: Array) -> Array:
    whole = jnp.broadcast_to(x, (_PIECE,))
    return plgpu.layout_cast(whole, _layout(_PIECE, _VECTOR))


def _is_finite(x: Array) -> Array:
    return (x > -jnp.inf) & (x < jnp.inf)


def _layout(size: int, vector: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=vector)


def _iota(size: int, vector: int) -> Array:
    layout = _layout(size, vector)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def _full(size: int, vector: int, value: float) -> Array:
    whole = jnp.full((size,), value, jnp.float32)
    return plgpu.layout_cast(whole, _layout(size, vector))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
