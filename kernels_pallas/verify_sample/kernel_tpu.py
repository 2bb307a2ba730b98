"""Verification and sampling of a pass on TPU.

The grid goes over the batch. A step holds all rows of a pass of one batch row: rows of
the pass are sublanes, the vocabulary is lanes. That is how the logits lie in memory, so
nothing is moved about to get there; eight rows cost what one does, which is why rows
after the first rejection are not skipped.

The logits are read once. Everything after that is sweeps over a float32 copy in VMEM:
32 for each filter that is on (bisection on the bits of the threshold, as the reference
does it), 18 for a draw (bisection on the index). No sum is ever compared with one that
was added in another order, so both bisections look at functions that truly grow.

Longer than other files: one kernel, whose parts share its row layout and helpers.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.typing import Array, Bool, Float, Int

_LANES = 128
_SUBLANES = 8

# Lanes of a sweep's step: 8 registers of a row block.
_CHUNK = 1024

# Tokens of a column of the two-stage Gumbel draw; part of that draw's definition.
_COLUMN = 256

# What a step may hold in VMEM. v5e and v6e have 128 MiB, TPU7x 64.
_VMEM_BYTES = 52 * 2**20

# An index that no token has. Indices are reduced as float32, exact to 2**24.
_NOWHERE = float(2**24)

# The key (see ``_key``) of -inf.
_LEAST_KEY = int(np.uint32(0x807FFFFF).astype(np.int32))

_MERGE: dict[str, tuple[Callable[..., Array], Callable[..., Array], float]] = {
    "sum": (jnp.add, jnp.sum, 0.0),
    "max": (jnp.maximum, jnp.max, -np.inf),
    "min": (jnp.minimum, jnp.min, np.inf),
}

Rule = Literal["greedy", "coupled", "rejection"]


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
    def rows(self) -> int:
        """Rows of the pass, up to whole registers."""
        return _round_up(self.n_drafts + 1, _SUBLANES)

    @property
    def n_chunks(self) -> int:
        """Steps of a sweep."""
        return -(-self.vocab // _CHUNK)

    @property
    def n_columns(self) -> int:
        """Columns of the two-stage Gumbel draw."""
        return -(-self.vocab // _COLUMN)

    @property
    def padded(self) -> int:
        """Lanes of the copy: a sweep's last step and a draw's last window fit in."""
        window = _round_up(self.n_columns, _LANES) + _LANES
        return _round_up((_COLUMN - 1) * self.n_columns + window, _CHUNK)


class _Refs(NamedTuple):
    """The kernel's references, in the order of its arguments; None where not there.

    Attributes:
      temperature: [B] in SMEM, as are the next five.
      top_k: [B].
      top_p: [B].
      log_min_p: natural log of min_p, [B].
      n_valid: [B].
      draw: uniform numbers of the draw, [B].
      logits: [1, N+1, V].
      tokens: drafts as float32, -1 where there is none, [1, rows, 1].
      accept: uniform numbers of the tests, [1, rows, 1].
      columns: Gumbel noise of the columns, -inf beyond them, [1, rows, C].
      lanes: Gumbel noise of the tokens of a column, [1, rows, 256].
      law: log-probabilities of the drafts, [1, N, V].
      n_accepted: result, [1, 1, 1].
      next_token: result, [1, 1, 1].
      log_normalizer: result, [1, N+1, 1].
      scores: the float32 copy, [rows, padded].
      choice: what follows if the way ends at this row, in all lanes, [rows, 128].
      chance: probability of each draft, in all lanes, [rows, 128].
      rest: the end of the law that is no whole chunk, [N, 1024].
    """

    temperature: Any
    top_k: Any
    top_p: Any
    log_min_p: Any
    n_valid: Any
    draw: Any
    logits: Any
    tokens: Any
    accept: Any
    columns: Any
    lanes: Any
    law: Any
    n_accepted: Any
    next_token: Any
    log_normalizer: Any
    scores: Any
    choice: Any
    chance: Any
    rest: Any


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
    vocab = logits.shape[-1]
    if rule not in ("greedy", "coupled", "rejection"):
        return f"{rule=} has no kernel; use greedy, coupled or rejection"
    if logits.dtype not in (jnp.float32, jnp.bfloat16):
        return f"logits are {logits.dtype}; they must be float32 or bfloat16"
    if logprobs is not None and logprobs.dtype != jnp.float32:
        return f"draft log-probabilities are {logprobs.dtype}; they must be float32"
    if not _COLUMN < vocab <= 2**24:
        return f"a vocabulary of {vocab} is not in ({_COLUMN}, {2**24}]"
    drawn = logprobs is not None and rule == "rejection" and n_drafts > 0
    needed = _vmem_bytes(_Pass(rule, vocab, n_drafts, drawn), logits.dtype)
    if needed > _VMEM_BYTES:
        return (
            f"{n_drafts + 1} rows of {vocab} logits need {needed / 2**20:.0f} MiB of "
            f"VMEM, more than {_VMEM_BYTES / 2**20:.0f}; use fewer drafts"
        )
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
    interpret: Any = False,
) -> tuple[Array, Array, Array]:
    """Verifies drafts and draws what follows; see ``specjax.ops.verify_sample``.

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
      interpret: as in ``pallas_call``.

    Returns:
      Accepted drafts [B], the next token [B], and the log-normaliser of each row of
      logits [B, N+1].
    """
    batch, width, vocab = logits.shape
    n_drafts = width - 1
    drawn = logprobs is not None and rule == "rejection" and n_drafts > 0
    shape = _Pass(rule, vocab, n_drafts, drawn)
    rows = lambda x, fill: jnp.pad(
        x.astype(jnp.float32),
        ((0, 0), (0, shape.rows - x.shape[1])),
        constant_values=fill,
    )[..., None]
    scalars = {
        "temperature": temperature.astype(jnp.float32),
        "top_k": top_k.astype(jnp.int32),
        "top_p": top_p.astype(jnp.float32),
        "log_min_p": jnp.log(min_p.astype(jnp.float32)),
        "n_valid": n_valid.astype(jnp.int32),
    }
    blocks = {"logits": logits, "tokens": rows(tokens, -1)}
    if rule == "rejection":
        assert accept is not None and draw is not None
        scalars["draw"] = draw
        blocks["accept"] = rows(accept[:, :n_drafts], 0)
    elif rule == "coupled":
        assert gumbel is not None
        blocks |= _split_noise(gumbel, shape)
    if drawn:
        assert logprobs is not None
        blocks["law"] = logprobs
    f32 = jnp.float32
    scratch = {
        "scores": pltpu.VMEM((shape.rows, shape.padded), f32),
        "choice": pltpu.VMEM((shape.rows, _LANES), f32),
        "chance": pltpu.VMEM((shape.rows, _LANES), f32),
    }
    if drawn and vocab % _CHUNK:
        scratch["rest"] = pltpu.VMEM((n_drafts, _CHUNK), f32)
    outputs = {
        "n_accepted": jax.ShapeDtypeStruct((batch, 1, 1), jnp.int32),
        "next_token": jax.ShapeDtypeStruct((batch, 1, 1), jnp.int32),
        "log_normalizer": jax.ShapeDtypeStruct((batch, width, 1), f32),
    }
    of_row = lambda x: pl.BlockSpec((1, *x.shape[1:]), lambda b: (b, 0, 0))
    n_accepted, next_token, log_normalizer = pl.pallas_call(
        functools.partial(
            _kernel, shape=shape, names=(*scalars, *blocks, *outputs, *scratch)
        ),
        grid=(batch,),
        in_specs=[
            *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in scalars),
            *(of_row(x) for x in blocks.values()),
        ],
        out_specs=[of_row(x) for x in outputs.values()],
        out_shape=list(outputs.values()),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=_vmem_bytes(shape, logits.dtype) + 4 * 2**20,
        ),
        cost_estimate=_cost(shape, batch, logits.dtype),
        interpret=interpret,
        name=f"verify_sample_{rule}",
    )(*scalars.values(), *blocks.values())
    return n_accepted[:, 0, 0], next_token[:, 0, 0], log_normalizer[..., 0]


def _kernel(*refs: Any, shape: _Pass, names: tuple[str, ...]) -> None:
    """Decides one batch row."""
    given = dict(zip(names, refs, strict=True))
    r = _Refs(**{name: given.get(name) for name in _Refs._fields})
    b = pl.program_id(0)
    _copy(r, shape)
    top, best = _argmax_and_normalizer(r, shape)
    token = r.tokens[0]
    spread = lambda x: jnp.broadcast_to(x, r.choice.shape)
    r.choice[...] = spread(best)
    r.chance[...] = spread(jnp.where(token == best, 1.0, 0.0))

    if shape.rule != "greedy":

        @pl.when(r.temperature[b] > 0)
        def _():
            # Of a row without a law the token is 0, and drafts are not accepted.
            scaled = top / r.temperature[b]
            sound = jnp.isfinite(scaled)
            _scale_and_filter(r, b, shape, scaled)
            if shape.rule == "coupled":
                choice = _draw_gumbel(r, shape)
            else:
                choice, chance = _draw_uniform(r, b, shape, scaled)
                r.chance[...] = spread(jnp.where(sound, chance, -1.0))
            r.choice[...] = spread(jnp.where(sound, choice, 0.0))

    choice = r.choice[:, :1]
    if shape.rule == "rejection":
        passed = _pass_ratio_test(r, shape)
    else:
        passed = token == choice
    row = lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0)
    passed &= row < r.n_valid[b]
    row = row.astype(jnp.float32)
    end = jnp.min(jnp.where(passed, float(shape.rows), row), axis=0, keepdims=True)
    after = jnp.sum(jnp.where(row == end, choice, 0.0), axis=0, keepdims=True)
    r.n_accepted[0] = end.astype(jnp.int32)
    r.next_token[0] = after.astype(jnp.int32)


def _copy(r: _Refs, shape: _Pass) -> None:
    """Copies the logits to ``scores``, -inf beyond the vocabulary and the rows."""
    n_rows = shape.n_drafts + 1
    full = shape.vocab // _CHUNK
    start = full * _CHUNK
    if start < shape.padded:
        nothing = (shape.rows, shape.padded - start)
        r.scores[:, start:] = jnp.full(nothing, -jnp.inf, jnp.float32)

    def copy(c: Array, carry: int) -> int:
        at = pl.ds(pl.multiple_of(c * _CHUNK, _CHUNK), _CHUNK)
        if n_rows < shape.rows:
            r.scores[:, at] = jnp.full((shape.rows, _CHUNK), -jnp.inf, jnp.float32)
        r.scores[:n_rows, at] = r.logits[0, :, at].astype(jnp.float32)
        return carry

    _loop(full, copy, 0)
    if start < shape.vocab:
        last = slice(start, shape.vocab)
        r.scores[:n_rows, last] = r.logits[0, :, last].astype(jnp.float32)


def _argmax_and_normalizer(r: _Refs, shape: _Pass) -> tuple[Array, Array]:
    """Writes the log-normaliser; returns the maximum and its lowest index.

    The maximum of a row that holds NaN is NaN, its index 0.
    """
    top, n_nan = _sweep(
        r.scores,
        shape,
        ("max", lambda x, _: x),
        ("sum", lambda x, _: jnp.where(x != x, 1.0, 0.0)),
    )
    top = jnp.where(n_nan > 0, jnp.nan, top)
    shift = jnp.where(jnp.isfinite(top), top, 0.0)
    total, best = _sweep(
        r.scores,
        shape,
        ("sum", lambda x, _: jnp.exp(x - shift)),
        ("min", lambda x, v: jnp.where(x == top, v.astype(jnp.float32), _NOWHERE)),
    )
    normalizer = jnp.where(n_nan > 0, jnp.nan, jnp.log(total) + shift)
    r.log_normalizer[0] = normalizer[: shape.n_drafts + 1]
    return top, jnp.where(best < shape.vocab, best, 0.0)


def _scale_and_filter(r: _Refs, b: Array, shape: _Pass, top: Array) -> None:
    """Applies temperature, top-k, top-p and min-p to ``scores``, in this order.

    Args:
      r: references.
      b: batch row.
      shape: of the pass.
      top: the largest scaled score of each row, [rows, 1].
    """
    temperature = r.temperature[b]
    _rewrite(r.scores, shape, lambda x, _: x / temperature)
    weight = lambda x: jnp.exp(x - top)
    column = lambda x: jnp.full((shape.rows, 1), x, jnp.float32)

    @pl.when((r.top_k[b] > 0) & (r.top_k[b] < shape.vocab))
    def _():
        goal = column(r.top_k[b].astype(jnp.float32))
        _keep_largest(r.scores, shape, top, jnp.ones_like, goal)

    @pl.when(r.top_p[b] < 1)
    def _():
        (total,) = _sweep(r.scores, shape, ("sum", lambda x, _: weight(x)))
        least = float(np.finfo(np.float32).tiny)
        goal = jnp.maximum(r.top_p[b] * total, least)
        _keep_largest(r.scores, shape, top, weight, goal)

    @pl.when(r.log_min_p[b] > -jnp.inf)
    def _():
        floor = top + r.log_min_p[b]
        _rewrite(r.scores, shape, lambda x, _: jnp.where(x >= floor, x, -jnp.inf))


def _keep_largest(
    scores: Any,
    shape: _Pass,
    top: Array,
    weight: Callable[[Array], Array],
    goal: Array,
) -> None:
    """Keeps the smallest set of largest scores whose weights reach the goal.

    Of equal scores the lowest indices are kept. The rest becomes -inf.

    Args:
      scores: [rows, padded].
      shape: of the pass.
      top: the largest of each row, [rows, 1].
      weight: non-negative, of each score.
      goal: above 0, [rows, 1].
    """
    sum_where = lambda test: _sweep(
        scores, shape, ("sum", lambda x, _: jnp.where(test(x), weight(x), 0.0))
    )[0]

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # Midpoint without overflow.
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        least = _score(middle)
        reaches = sum_where(lambda x: x >= least) >= goal
        # A row that has ended must not go below a low that does not reach.
        fall = jnp.maximum(middle, low + 1)
        return jnp.where(reaches, middle, low), jnp.where(reaches, high, fall)

    low = jnp.full((shape.rows, 1), _LEAST_KEY, jnp.int32)
    least = _score(lax.fori_loop(0, 32, halve, (low, _key(top) + 1))[0])

    missing = goal - sum_where(lambda x: x > least)
    tie_weight = weight(least)
    (n_ties,) = _sweep(
        scores, shape, ("sum", lambda x, _: jnp.where(x == least, 1.0, 0.0))
    )
    wanted = jnp.ceil(missing / jnp.where(tie_weight > 0, tie_weight, 1.0))
    wanted = jnp.minimum(jnp.maximum(wanted, 1.0), n_ties)
    in_part = jnp.max(jnp.where(wanted < n_ties, 1.0, 0.0)) > 0

    @pl.when(in_part)
    def _():
        is_tie = lambda x, v, end: jnp.where((x == least) & (v <= end), 1.0, 0.0)
        n_up_to = lambda end: _sweep(
            scores, shape, ("sum", lambda x, v: is_tie(x, v, end))
        )[0]
        end = _first_index(shape, lambda end: n_up_to(end) >= wanted)
        keep = lambda x, v: (x > least) | ((x == least) & (v <= end))
        _rewrite(scores, shape, lambda x, v: jnp.where(keep(x, v), x, -jnp.inf))

    @pl.when(jnp.logical_not(in_part))
    def _():
        _rewrite(scores, shape, lambda x, _: jnp.where(x >= least, x, -jnp.inf))


def _draw_uniform(r: _Refs, b: Array, shape: _Pass, top: Array) -> tuple[Array, Array]:
    """Draws the token after each row, and reads the drafts' probabilities.

    Where a draft stands after the row, the draw is from what the draft's law leaves of
    the target's: that row's token is used only if its draft was rejected. ``scores``
    become the weights.

    Args:
      r: references.
      b: batch row.
      shape: of the pass.
      top: the largest score of each row, [rows, 1].

    Returns:
      Tokens as float32 and probabilities, [rows, 1].
    """
    mass_of = lambda x, _: jnp.exp(x - top)
    (normalizer,) = _sweep(r.scores, shape, ("sum", mass_of))
    law = lambda x: jnp.exp(x - top) / normalizer
    token = r.tokens[0]
    row = lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0)
    drafted = row < r.n_valid[b]
    hit = lambda v: v.astype(jnp.float32) == token
    (chance,) = _sweep(
        r.scores, shape, ("sum", lambda x, v: jnp.where(hit(v), law(x), 0.0))
    )
    if shape.drawn:
        _write_residual(r, shape, drafted, law)
    else:
        # What a point mass leaves has nothing of the draft itself; nothing else
        # left means that the draft is all there is.
        others = lambda x, v: jnp.where(hit(v), 0.0, law(x))
        (left,) = _sweep(r.scores, shape, ("sum", others))
        use = drafted & (left > 0)
        _rewrite(r.scores, shape, lambda x, v: jnp.where(use & hit(v), 0.0, law(x)))

    def mass(end: Array) -> Array:
        up_to = lambda x, v: jnp.where(v <= end, x, 0.0)
        return _sweep(r.scores, shape, ("sum", up_to))[0]

    total = mass(jnp.full((shape.rows, 1), shape.vocab, jnp.int32))
    # A rounded-up product could reach the total itself; then no index exceeds it.
    below = _from_bits(_to_bits(total) - 1)
    goal = jnp.minimum(r.draw[b] * total, below)
    index = _first_index(shape, lambda end: mass(end) > goal)
    return index.astype(jnp.float32), chance


def _write_residual(
    r: _Refs, shape: _Pass, drafted: Bool[Array, "W 1"], law: Callable[[Array], Array]
) -> None:
    """Makes weights of scores: max(p - q, 0) where drafted and anything is left."""
    n = shape.n_drafts
    full = shape.vocab // _CHUNK
    if r.rest is not None:
        r.rest[...] = jnp.full(r.rest.shape, -jnp.inf, jnp.float32)
        r.rest[:, : shape.vocab % _CHUNK] = r.law[0, :, full * _CHUNK :]

    def chunks(step: Callable[..., Any], carry: Any) -> Any:
        """Runs step(where, p, q, carry) over the vocabulary."""

        def one(c: Array, carry: Any) -> Any:
            at = pl.ds(pl.multiple_of(c * _CHUNK, _CHUNK), _CHUNK)
            return step(at, law(r.scores[:, at]), jnp.exp(r.law[0, :, at]), carry)

        carry = _loop(full, one, carry)
        if r.rest is not None:
            at = pl.ds(full * _CHUNK, _CHUNK)
            carry = step(at, law(r.scores[:, at]), jnp.exp(r.rest[...]), carry)
        return carry

    def add(at: Any, p: Array, q: Array, total: Array) -> Array:
        left = jnp.maximum(p[:n] - q, 0.0)
        return total + _fold(left, jnp.add)

    left = chunks(add, jnp.zeros((n, _LANES), jnp.float32))
    # Rounding can leave nothing although a rejection happened: then p equals q to
    # rounding, and p is the right law.
    use = drafted[:n] & (jnp.sum(left, axis=1, keepdims=True) > 0)

    def write(at: Any, p: Array, q: Array, carry: int) -> int:
        r.scores[:, at] = p
        left = jnp.maximum(p[:n] - q, 0.0)
        r.scores[:n, at] = jnp.where(use, left, p[:n])
        return carry

    chunks(write, 0)


def _pass_ratio_test(r: _Refs, shape: _Pass) -> Bool[Array, "W 1"]:
    """Tests u * q(draft) < p(draft) in every row that has a draft."""
    chance, u = r.chance[:, :1], r.accept[0]
    if not shape.drawn:
        return u < chance
    n, token = shape.n_drafts, r.tokens[0][: shape.n_drafts]
    full, size = shape.vocab // _CHUNK, shape.vocab % _CHUNK

    def read(at: Any, start: Array | int, size: int) -> Array:
        index = start + lax.broadcasted_iota(jnp.int32, (n, size), 1)
        hit = index.astype(jnp.float32) == token
        return jnp.where(hit, jnp.exp(r.law[0, :, at]), 0.0)

    def one(c: Array, total: Array) -> Array:
        start = pl.multiple_of(c * _CHUNK, _CHUNK)
        return total + _fold(read(pl.ds(start, _CHUNK), start, _CHUNK), jnp.add)

    q = _loop(full, one, jnp.zeros((n, _LANES), jnp.float32))
    q = jnp.sum(q, axis=1, keepdims=True)
    if size:
        start = full * _CHUNK
        last = read(slice(start, shape.vocab), start, size)
        q += jnp.sum(last, axis=1, keepdims=True)
    # Rows without a draft: a probability that none is below.
    pad = jnp.ones((shape.rows - n, 1), jnp.float32)
    q = jnp.concatenate([q, pad], axis=0) if shape.rows > n else q
    return u * q < chance


def _draw_gumbel(r: _Refs, shape: _Pass) -> Float[Array, "W 1"]:
    """Draws a token of every row: first a column of 256, then one of its tokens.

    Returns:
      Tokens as float32, [rows, 1].
    """
    n_columns = shape.n_columns
    n_parts = -(-n_columns // _LANES)
    rows = shape.rows
    lane = lax.broadcasted_iota(jnp.int32, (rows, _LANES), 1)
    numbers = [(lane + j * _LANES).astype(jnp.float32) for j in range(n_parts)]

    def tokens(i: Array) -> list[Array]:
        """Reads the i-th token of every column, 128 columns a part."""
        start = i * n_columns
        base = pl.multiple_of((start >> 7) << 7, _LANES)
        offset = start - base
        x = r.scores[:, pl.ds(base, (n_parts + 1) * _LANES)]
        turn = lax.rem(_LANES - offset, _LANES)
        turned = [
            pltpu.roll(x[:, j * _LANES : (j + 1) * _LANES], turn, 1)
            for j in range(n_parts + 1)
        ]
        here = lane < _LANES - offset
        return [jnp.where(here, turned[j], turned[j + 1]) for j in range(n_parts)]

    def over(step: Callable[..., Array], start: float) -> list[Array]:
        """Folds step(part, total, x) over the tokens of each column."""
        one = lambda i, totals: [
            step(j, total, x)
            for j, (total, x) in enumerate(zip(totals, tokens(i), strict=True))
        ]
        first = [jnp.full((rows, _LANES), start, jnp.float32)] * n_parts
        return lax.fori_loop(0, _COLUMN, one, first)

    top = over(lambda _, total, x: jnp.maximum(total, x), -np.inf)
    shift = [jnp.where(jnp.isfinite(x), x, 0.0) for x in top]
    mass = over(lambda j, total, x: total + jnp.exp(x - shift[j]), 0.0)
    perturbed = [
        jnp.log(mass[j]) + shift[j] + r.columns[0, :, j * _LANES : (j + 1) * _LANES]
        for j in range(n_parts)
    ]
    column = _argmax(perturbed, numbers)

    def read(i: Array, found: list[Array]) -> list[Array]:
        parts = tokens(i)
        hits = [
            jnp.where(numbers[j] == column, parts[j], -jnp.inf) for j in range(n_parts)
        ]
        value = jnp.max(functools.reduce(jnp.maximum, hits), axis=1, keepdims=True)
        return [
            jnp.where(lane + j * _LANES == i, value, x) for j, x in enumerate(found)
        ]

    n_halves = _COLUMN // _LANES
    found = [jnp.zeros((rows, _LANES), jnp.float32)] * n_halves
    found = lax.fori_loop(0, _COLUMN, read, found)
    halves = [slice(j * _LANES, (j + 1) * _LANES) for j in range(n_halves)]
    perturbed = [x + r.lanes[0, :, at] for x, at in zip(found, halves, strict=True)]
    numbers = [(lane + at.start).astype(jnp.float32) for at in halves]
    return _argmax(perturbed, numbers) * float(n_columns) + column


def _argmax(parts: list[Array], numbers: list[Array]) -> Float[Array, "W 1"]:
    """Returns the lowest number of the largest value, 0 where there is none."""
    top = jnp.max(functools.reduce(jnp.maximum, parts), axis=1, keepdims=True)
    at = [jnp.where(x == top, n, _NOWHERE) for x, n in zip(parts, numbers, strict=True)]
    first = jnp.min(functools.reduce(jnp.minimum, at), axis=1, keepdims=True)
    return jnp.where(first < _NOWHERE, first, 0.0)


def _loop(n: int, step: Callable[..., Any], carry: Any) -> Any:
    """Runs a loop, of no steps too: its slices need not fit then."""
    return lax.fori_loop(0, n, step, carry) if n else carry


def _sweep(
    scores: Any,
    shape: _Pass,
    *parts: tuple[str, Callable[[Array, Array], Array]],
) -> tuple[Array, ...]:
    """Reduces functions of (score, index) over the vocabulary in one sweep.

    Args:
      scores: [rows, padded].
      shape: of the pass.
      *parts: how to reduce (``sum``, ``max``, ``min``), and the function.

    Returns:
      The reductions, [rows, 1] each. The order of a sum is fixed, so that one over
      non-negative values does not fall when values grow.
    """

    def step(c: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        start = pl.multiple_of(c * _CHUNK, _CHUNK)
        x = scores[:, pl.ds(start, _CHUNK)]
        index = start + lax.broadcasted_iota(jnp.int32, x.shape, 1)
        merges = [_MERGE[kind][0] for kind, _ in parts]
        values = [value(x, index) for _, value in parts]
        return tuple(
            merge(total, _fold(value, merge))
            for merge, total, value in zip(merges, totals, values, strict=True)
        )

    start = lambda kind: jnp.full((shape.rows, _LANES), _MERGE[kind][2], jnp.float32)
    first = tuple(start(kind) for kind, _ in parts)
    totals = lax.fori_loop(0, shape.n_chunks, step, first)
    return tuple(
        _MERGE[kind][1](total, axis=1, keepdims=True)
        for (kind, _), total in zip(parts, totals, strict=True)
    )


def _rewrite(scores: Any, shape: _Pass, value: Callable[[Array, Array], Array]) -> None:
    """Replaces every score by a function of (score, index)."""

    @pl.loop(0, shape.n_chunks)
    def _(c):
        start = pl.multiple_of(c * _CHUNK, _CHUNK)
        at = pl.ds(start, _CHUNK)
        x = scores[:, at]
        scores[:, at] = value(x, start + lax.broadcasted_iota(jnp.int32, x.shape, 1))


def _first_index(shape: _Pass, reaches: Callable[[Array], Array]) -> Int[Array, "W 1"]:
    """Finds the lowest index at which a test that stays true becomes true.

    Args:
      shape: of the pass.
      reaches: the test of an index of each row, true at the last.

    Returns:
      The indices, int32 [rows, 1].
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) >> 1
        # A row that has ended stays: its low was seen not to reach.
        reached = reaches(middle) & (middle > low)
        return jnp.where(reached, low, middle), jnp.where(reached, middle, high)

    low = jnp.full((shape.rows, 1), -1, jnp.int32)
    high = jnp.full((shape.rows, 1), shape.vocab - 1, jnp.int32)
    return lax.fori_loop(0, shape.vocab.bit_length(), halve, (low, high))[1]


def _fold(x: Float[Array, "W K"], merge: Callable[..., Array]) -> Float[Array, "W M"]:
    """Merges whole registers of a row, halves onto halves, down to one."""
    parts = [x[:, j : j + _LANES] for j in range(0, x.shape[1], _LANES)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [merge(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def _key(x: Float[Array, "W 1"]) -> Int[Array, "W 1"]:
    """Maps float32 to int32 so that the order is kept (-0 and +0 together)."""
    bits = _to_bits(jnp.where(x == 0, 0.0, x))
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _score(key: Int[Array, "W 1"]) -> Float[Array, "W 1"]:
    """Maps keys back to float32."""
    return _from_bits(key ^ ((key >> 31) & jnp.int32(0x7FFFFFFF)))


def _to_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _from_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.float32)


def _split_noise(
    gumbel: Float[Array, "B N1 Z"], shape: _Pass
) -> dict[str, Float[Array, "B W M"]]:
    """Splits the noise of a draw into that of the columns and of their tokens."""
    n = shape.n_columns
    more = shape.rows - gumbel.shape[1]
    columns = jnp.pad(
        gumbel[..., :n], ((0, 0), (0, more), (0, -n % _LANES)), constant_values=-jnp.inf
    )
    return {
        "columns": columns,
        "lanes": jnp.pad(gumbel[..., n:], ((0, 0), (0, more), (0, 0))),
    }


def _vmem_bytes(shape: _Pass, dtype: Any) -> int:
    """Returns what a step holds, input blocks twice: one is loaded meanwhile."""
    size = jnp.dtype(dtype).itemsize
    lanes = _round_up(shape.vocab, _LANES)
    rows = _round_up(shape.n_drafts + 1, _SUBLANES * 4 // size)
    total = 2 * rows * lanes * size + 4 * shape.rows * shape.padded
    if shape.drawn:
        total += 2 * 4 * _round_up(shape.n_drafts, _SUBLANES) * lanes
    return total


def _cost(shape: _Pass, batch: int, dtype: Any) -> pl.CostEstimate:
    """Estimates a call with top-k and top-p off."""
    n = batch * shape.vocab
    width = shape.n_drafts + 1
    read = n * width * jnp.dtype(dtype).itemsize
    if shape.drawn:
        read += 4 * n * shape.n_drafts
    sweeps = {"greedy": 3, "coupled": 6, "rejection": 25}[shape.rule]
    return pl.CostEstimate(
        flops=4 * sweeps * n * width,
        transcendentals=4 * n * width,
        bytes_accessed=read,
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
