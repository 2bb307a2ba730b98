"""What becomes of a verdict: the tokens it emits, where they stop, what is written."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode._state import DecodeState, Origin, RowStats, Status, TopTokens
from specjax.drafters import Proposal
from specjax.ops.vocab import log_normalizer
from specjax.trees import tree_arrays
from specjax.typing import Array, Float, Int
from specjax.verify import Verdict


class Way(NamedTuple):
    """Which rows of a pass led to what it emits.

    Attributes:
      tokens: drafts along the way, [B, W]; junk beyond what was accepted.
      rows: of the pass, that scored the i-th token emitted, [B, W]; None: row i.
      goes_on: whether a draft follows the i-th row of the way, bool [B, W].
    """

    tokens: Int[Array, "B W"]
    rows: Int[Array, "B W"] | None
    goes_on: Array


def follow(proposal: Proposal, verdict: Verdict) -> Way:
    """Follows what was accepted through the pass."""
    size = proposal.tokens.shape[1]
    drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    n_valid = proposal.n_valid[:, None]
    if verdict.path is None or proposal.parents is None:
        return Way(drafts, None, jnp.arange(size + 1)[None, :] < n_valid)
    path = jnp.maximum(verdict.path, 0)
    rows = jnp.pad(path + 1, ((0, 0), (1, 0)))
    tokens = jnp.take_along_axis(drafts, jnp.pad(path, ((0, 0), (0, 1))), axis=1)
    # Nodes that count mark the rows that they follow.
    valid = jnp.arange(size)[None, :] < n_valid
    marks = jnp.zeros(rows.shape, bool)
    batch = jnp.arange(rows.shape[0])[:, None]
    marks = marks.at[batch, proposal.parents + 1].max(valid)
    return Way(tokens, rows, jnp.take_along_axis(marks, rows, axis=1))


def score_of(
    scores: Float[Array, "B W V"], rows: Int[Array, "B W"] | None, tokens: Array
) -> Float[Array, "B W"]:
    """Reads each emitted token's entry in the row that scored it."""
    if rows is None:
        return jnp.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]
    return scores[jnp.arange(scores.shape[0])[:, None], rows, tokens]


def along(x: Array, rows: Int[Array, "B W"] | None) -> Array:
    """Puts what belongs to rows of the pass in the order of what is emitted."""
    if rows is None:
        return x
    return jnp.take_along_axis(x, rows.reshape(*rows.shape, *(1,) * (x.ndim - 2)), 1)


def emit(
    verdict: Verdict, way: Way, logits: Float[Array, "B W V"]
) -> tuple[Array, Array, Array]:
    """Lines up the tokens a pass may emit: accepted drafts, then the next token.

    Returns:
      Tokens [B, W] (junk beyond n_accepted), their log-probabilities under the raw
      logits, and whether the logits that scored each are finite enough to be used.
    """
    position = jnp.arange(logits.shape[1])[None, :]
    emitted = jnp.where(
        position == verdict.n_accepted[:, None],
        verdict.next_token[:, None],
        way.tokens,
    )
    normalizer = along(log_normalizer(logits), way.rows)
    score = score_of(logits, way.rows, emitted)
    return emitted, score - normalizer, jnp.isfinite(normalizer)


def truncate(
    state: DecodeState,
    verdict: Verdict,
    way: Way,
    emitted: Array,
    finite: Array,
    possible: Array,
) -> tuple[Array, Array]:
    """Finds how much of what a pass emits is committed, and what becomes of rows.

    Args:
      state: slots.
      verdict: what the rule decided.
      way: through the pass.
      emitted: what the pass may emit, [B, W].
      finite: whether the logits of each position can be used, [B, W].
      possible: whether the token may stand there. A rule never picks one that may
        not unless none may: then the controls left nothing.

    Returns:
      Tokens committed, [B], and the new status, [B].
    """
    width = emitted.shape[1]
    position = jnp.arange(width)[None, :]
    n = verdict.n_accepted + 1
    inside = position < n[:, None]
    first = lambda mark: jnp.min(jnp.where(mark & inside, position, width), axis=1)
    bad = first(~finite | ~possible)
    stop = first(jnp.any(emitted[..., None] == state.stop_ids[:, None, :], axis=-1))
    n = jnp.minimum(jnp.minimum(n, bad), stop + 1)
    if way.rows is not None:
        # A tree may reach beyond the limit; what a chain drafts never does.
        n = jnp.minimum(n, state.limit - state.length)
    running = state.status == Status.RUNNING
    n = jnp.where(running, n, 0)
    status = jnp.where(
        bad <= jnp.minimum(stop, verdict.n_accepted),
        jnp.where(first(~finite) == bad, Status.ERROR, Status.DEAD_END),
        jnp.where(
            stop < width,
            Status.STOPPED,
            jnp.where(state.length + n >= state.limit, Status.LENGTH, Status.RUNNING),
        ),
    )
    return n, jnp.where(running, status, state.status).astype(jnp.int32)


def append(
    state: DecodeState,
    proposal: Proposal,
    verdict: Verdict,
    way: Way,
    emitted: Array,
    logprobs: Array,
    n_committed: Array,
) -> DecodeState:
    """Writes the committed tokens behind each row's text."""
    batch, width = emitted.shape
    position = jnp.arange(width)[None, :]
    end = verdict.n_accepted[:, None]
    rejected = jnp.take_along_axis(way.goes_on, end, axis=1)[:, 0]
    last = jnp.where(
        proposal.n_valid == 0,
        Origin.PLAIN,
        jnp.where(rejected, Origin.CORRECTION, Origin.BONUS),
    )
    origin = jnp.where(
        position < verdict.n_accepted[:, None], Origin.ACCEPTED, last[:, None]
    )
    size = state.tokens.shape[1]
    # Positions that are not committed point past the end, where "drop" ignores them.
    at = jnp.where(
        position < n_committed[:, None], state.length[:, None] + position, size
    )
    rows = jnp.arange(batch)[:, None]
    return state.replace(
        tokens=state.tokens.at[rows, at].set(emitted, mode="drop"),
        logprobs=state.logprobs.at[rows, at].set(logprobs, mode="drop"),
        origin=state.origin.at[rows, at].set(origin.astype(jnp.int8), mode="drop"),
        length=state.length + n_committed,
        n_new=n_committed,
    )


def append_top(
    state: DecodeState,
    scored_by: Int[Array, "B W"] | None,
    logits: Float[Array, "B W V"],
    n_committed: Array,
) -> DecodeState:
    """Writes the most probable tokens of the committed positions."""
    if state.top is None:
        return state
    batch, width, _ = logits.shape
    values, ids = jax.lax.top_k(logits, state.top.ids.shape[2])
    position = jnp.arange(width)[None, :]
    at = jnp.where(
        position < n_committed[:, None],
        state.length[:, None] - n_committed[:, None] + position,
        state.tokens.shape[1],
    )
    rows = jnp.arange(batch)[:, None]
    logprobs = values - log_normalizer(logits)[..., None]
    put = lambda old, new: old.at[rows, at].set(along(new, scored_by), mode="drop")
    top = TopTokens(
        put(state.top.ids, ids),
        put(state.top.logprobs, logprobs),
    )
    return state.replace(top=top)


def count(
    state: DecodeState,
    proposal: Proposal,
    verdict: Verdict,
    way: Way,
    n_committed: Array,
    width: int,
) -> RowStats:
    """Adds a pass of ``width`` rows to each running slot's counters."""
    stats = state.stats
    running = (state.status == Status.RUNNING).astype(jnp.int32)
    verified = proposal.n_valid * running
    accepted = verdict.n_accepted * running
    levels = stats.verified_at.shape[1]
    position = jnp.arange(levels)[None, :]
    kept = position < accepted[:, None]
    if way.rows is None:
        scored = position < verified[:, None]
        reached = scored & (position <= accepted[:, None])
    else:
        # Of a tree: levels with a draft, and those that the way came to.
        assert proposal.parents is not None
        depth = tree_arrays(proposal.parents, verified).depth
        scored = jnp.any(depth[:, None, :] == position[..., None] + 1, axis=-1)
        goes_on = jnp.pad(way.goes_on, ((0, 0), (0, max(levels - width, 0))))
        reached = goes_on[:, :levels] & (position <= accepted[:, None])
        reached &= scored
    return RowStats(
        passes=stats.passes + running,
        wide_passes=stats.wide_passes + (running if width > 1 else 0),
        verified=stats.verified + verified,
        accepted=stats.accepted + accepted,
        committed=stats.committed + n_committed,
        verified_at=stats.verified_at + scored.astype(jnp.int32),
        reached_at=stats.reached_at + reached.astype(jnp.int32),
        accepted_at=stats.accepted_at + kept.astype(jnp.int32),
    )
