"""One speculative pass: propose, score, verify, commit."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode._state import DecodeState, Origin, RowStats, Status, TopTokens
from specjax.drafters import DraftContext, Drafter, Proposal, Scored, TargetView
from specjax.models import Features, Target
from specjax.ops.vocab import log_normalizer, top_ids
from specjax.sampling import (
    advance_controls,
    apply_controls,
    gumbel_noise,
    uniform_noise,
    warp,
)
from specjax.typing import Array, Float, Int, Params
from specjax.verify import Evidence, Verdict, VerifyRule
from specjax.verify import greedy as argmax_rule


class PassInfo(NamedTuple):
    """Diagnostics of a pass; unused fields vanish under jit.

    Attributes:
      proposal: what was verified.
      verdict: what the rule decided.
      n_committed: tokens appended to each row, [B].
    """

    proposal: Proposal
    verdict: Verdict
    n_committed: Int[Array, " B"]


def draft(
    target_params: Params,
    draft_params: Params | None,
    state: DecodeState,
    *,
    target: Target,
    drafter: Drafter,
) -> tuple[Proposal, DecodeState]:
    """Asks the drafter, and keeps of its answer what may be verified.

    Args:
      target_params: the target's parameters.
      draft_params: the drafter's parameters.
      state: slots.
      target: the target.
      drafter: the drafter.

    Returns:
      A proposal whose ``n_valid`` is 0 for rows that do not run, keeps to the row's
      ``max_drafts``, leaves room for the next token before its limit, and ends before
      the first id outside the vocabulary or drawn from a law that is none (NaN, +inf,
      or nothing but -inf); and the state with the drafter's.
    """
    room = jnp.clip(state.limit - state.length - 1, 0, drafter.spec.gamma)
    room = jnp.minimum(room, state.max_drafts)
    budget = jnp.where(state.status == Status.RUNNING, room, 0)
    context = _context(state, None)._replace(budget=budget)
    if drafter.spec.on_target:
        view = TargetView(target_params, state.cache)
        context = context._replace(target=view)
    proposal, drafter_state = drafter.propose(draft_params, state.draft, context)
    n_valid = jnp.minimum(proposal.n_valid, budget)
    known = (proposal.tokens >= 0) & (proposal.tokens < target.spec.vocab_size)
    sound = known
    if proposal.logprobs is not None:
        if proposal.logprobs.dtype != jnp.float32:
            raise TypeError(
                f"drafter {drafter.spec.name!r}: Proposal.logprobs is "
                f"{proposal.logprobs.dtype}; it must be the float32 array that the "
                "tokens were drawn from."
            )
        # The largest entry is NaN where any is.
        sound &= jnp.isfinite(jnp.max(proposal.logprobs, axis=-1))
    n_sound = jnp.sum(jnp.cumprod(sound.astype(jnp.int32), axis=1), axis=1)
    proposal = proposal._replace(
        tokens=jnp.where(known, proposal.tokens, 0),
        n_valid=jnp.minimum(n_valid, n_sound),
    )
    state = state.replace(draft=drafter_state)
    if proposal.cache is not None:
        # What it wrote lies behind the committed text.
        state = state.replace(cache=proposal.cache)
        proposal = proposal._replace(cache=None)
    return proposal, state


def verify_and_commit(
    target_params: Params,
    draft_params: Params | None,
    state: DecodeState,
    proposal: Proposal,
    *,
    target: Target,
    drafter: Drafter,
    rule: VerifyRule,
    width: int,
    n_ids: int | None = None,
) -> tuple[DecodeState, PassInfo]:
    """Scores a proposal in one pass of ``width`` rows and commits what is kept.

    Args:
      target_params: the target's parameters.
      draft_params: the drafter's parameters.
      state: slots; each running row's cache holds all its tokens but the last.
      proposal: from ``draft``. With a width below N + 1 the drafts beyond are not
        looked at (their ``n_valid`` must be 0); with one above, rows of padding
        are computed and ignored.
      target: the target.
      drafter: the drafter.
      rule: the verify rule.
      width: rows of the pass, static.
      n_ids: ids that have a token; the target's logits beyond are padding. None: all.

    Returns:
      The state after the pass, and diagnostics.
    """
    proposal = _fit(proposal, width - 1)
    pending = jnp.take_along_axis(
        state.tokens, jnp.maximum(state.length - 1, 0)[:, None], axis=1
    )
    block = jnp.concatenate([pending, proposal.tokens], axis=1)
    if proposal.hidden is None:
        logits, features, cache = target.forward(target_params, block, state.cache)
    else:
        assert target.halves is not None
        logits, features, cache = target.halves.finish(
            target_params,
            proposal.hidden,
            state.cache,
            start=drafter.spec.exit_block,
        )
    if n_ids is not None and n_ids < logits.shape[-1]:
        index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
        logits = jnp.where(index < n_ids, logits, -jnp.inf)
    with jax.named_scope("verify"):
        controlled = apply_controls(
            logits,
            state.controls,
            tokens=proposal.tokens,
            length=state.length,
            stop_ids=state.stop_ids,
        )
        verdict = _judge(state, proposal, controlled, features, rule)
        emitted, logprobs, finite = _emit(proposal, verdict, logits)
        score = jnp.take_along_axis(controlled, emitted[..., None], axis=-1)[..., 0]
        n_committed, status = _truncate(
            state, verdict, emitted, finite, score > -jnp.inf
        )
    scored = None
    if drafter.spec.n_top:
        n_rows = jnp.where(state.status == Status.RUNNING, proposal.n_valid + 1, 0)
        scored = Scored(block, n_rows, top_ids(logits, drafter.spec.n_top))
    with jax.named_scope("commit"):
        state = _append(state, proposal, verdict, emitted, logprobs, n_committed)
        state = _append_top(state, logits, n_committed)
        state = state.replace(
            controls=advance_controls(state.controls, emitted, n_committed),
            cache=target.commit(cache, n_committed),
            status=status,
            stats=_count(state, proposal, verdict, n_committed, width),
        )
        context = _context(state, features if drafter.spec.needs_features else None)
        context = context._replace(scored=scored)
        state = state.replace(draft=drafter.commit(draft_params, state.draft, context))
    return state, PassInfo(proposal, verdict, n_committed)


def spec_step(
    target_params: Params,
    draft_params: Params | None,
    state: DecodeState,
    *,
    target: Target,
    drafter: Drafter,
    rule: VerifyRule,
    widths: tuple[int, ...],
    n_ids: int | None = None,
) -> tuple[DecodeState, PassInfo | None]:
    """Runs one pass at the narrowest width that holds the proposal.

    Args:
      target_params: the target's parameters.
      draft_params: the drafter's parameters.
      state: slots.
      target: the target.
      drafter: the drafter.
      rule: the verify rule.
      widths: widths the compiled pass may have, ascending; the last is at least
        gamma + 1. One width means that every pass has it.
      n_ids: ids that have a token; None: all.

    Returns:
      The state, and the pass's diagnostics where there is a single width.
    """
    proposal, state = draft(
        target_params, draft_params, state, target=target, drafter=drafter
    )

    at = functools.partial(
        verify_and_commit,
        target_params,
        draft_params,
        target=target,
        drafter=drafter,
        rule=rule,
        n_ids=n_ids,
    )
    if len(widths) == 1:
        return at(state, proposal, width=widths[0])
    longest = jnp.max(proposal.n_valid)
    index = sum((longest + 1 > width).astype(jnp.int32) for width in widths[:-1])
    branches = [lambda s, p, w=width: at(s, p, width=w)[0] for width in widths]
    return jax.lax.switch(index, branches, state, proposal), None


def _context(state: DecodeState, features: Features | None) -> DraftContext:
    return DraftContext(
        history=state.tokens,
        length=state.length,
        settings=state.settings,
        features=features,
        n_new=state.n_new,
    )


def _fit(proposal: Proposal, n: int) -> Proposal:
    """Cuts or pads a proposal to n draft positions."""
    have = proposal.tokens.shape[1]

    def fit(x: Array, n: int = n, have: int = have) -> Array:
        pad = [(0, 0), (0, max(n - have, 0))] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x[:, :n], pad)

    hidden = proposal.hidden
    return Proposal(
        tokens=fit(proposal.tokens),
        logprobs=None if proposal.logprobs is None else fit(proposal.logprobs),
        n_valid=jnp.minimum(proposal.n_valid, n),
        confidence=None if proposal.confidence is None else fit(proposal.confidence),
        hidden=None if hidden is None else fit(hidden, n + 1, have + 1),
    )


def _judge(
    state: DecodeState,
    proposal: Proposal,
    logits: Float[Array, "B W V"],
    features: Features,
    rule: VerifyRule,
) -> Verdict:
    """Runs the rule on warped scores, with noise only where something samples.

    Args:
      state: slots.
      proposal: the drafts.
      logits: the target's, after the rows' controls.
      features: the target's, of the same rows.
      rule: the rule.

    Returns:
      The verdict, without diagnostics.
    """
    settings = state.settings
    batch, width, vocab = logits.shape
    if rule.greedy_only:
        return rule.verify(proposal, logits, None)

    def sampled(logits: Array) -> Verdict:
        scores = warp(logits, settings)
        if rule.noise == "gumbel":
            position = state.length[:, None] + jnp.arange(width)[None, :]
            noise = gumbel_noise(settings.seed, position, vocab)
        else:
            noise = uniform_noise(settings.seed, state.length, width - 1)
        more = ()
        if rule.evidence:
            judged = None
            if rule.judge is not None:
                # A judge need not know passes without drafts.
                none = jnp.zeros((batch, 0), jnp.float32)
                drafted = width > 1
                judged = rule.judge(features, proposal.tokens) if drafted else none
            logprobs = logits - log_normalizer(logits)[..., None]
            more = (Evidence(logprobs, judged),)
        verdict = rule.verify(proposal, scores, noise, *more)
        return verdict._replace(info={})

    def greedy(logits: Array) -> Verdict:
        # At temperature 0 the target's law is its argmax: no warp, no noise.
        return argmax_rule.verify(proposal, logits, None)._replace(info={})

    if rule.evidence:
        return sampled(logits)
    anyone = jnp.any((settings.temperature > 0) & (state.status == Status.RUNNING))
    return jax.lax.cond(anyone, sampled, greedy, logits)


def _emit(
    proposal: Proposal, verdict: Verdict, logits: Float[Array, "B W V"]
) -> tuple[Array, Array, Array]:
    """Lines up the tokens a pass may emit: accepted drafts, then the next token.

    Returns:
      Tokens [B, W] (junk beyond n_accepted), their log-probabilities under the raw
      logits, and whether each row's logits are finite enough to be used.
    """
    width = logits.shape[1]
    position = jnp.arange(width)[None, :]
    drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(
        position == verdict.n_accepted[:, None], verdict.next_token[:, None], drafts
    )
    normalizer = log_normalizer(logits)
    score = jnp.take_along_axis(logits, emitted[..., None], axis=-1)[..., 0]
    return emitted, score - normalizer, jnp.isfinite(normalizer)


def _truncate(
    state: DecodeState,
    verdict: Verdict,
    emitted: Array,
    finite: Array,
    possible: Array,
) -> tuple[Array, Array]:
    """Finds how much of what a pass emits is committed, and what becomes of rows.

    Args:
      state: slots.
      verdict: what the rule decided.
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


def _append(
    state: DecodeState,
    proposal: Proposal,
    verdict: Verdict,
    emitted: Array,
    logprobs: Array,
    n_committed: Array,
) -> DecodeState:
    """Writes the committed tokens behind each row's text."""
    batch, width = emitted.shape
    position = jnp.arange(width)[None, :]
    last = jnp.where(
        proposal.n_valid == 0,
        Origin.PLAIN,
        jnp.where(
            verdict.n_accepted == proposal.n_valid, Origin.BONUS, Origin.CORRECTION
        ),
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


def _append_top(
    state: DecodeState, logits: Float[Array, "B W V"], n_committed: Array
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
    top = TopTokens(
        state.top.ids.at[rows, at].set(ids, mode="drop"),
        state.top.logprobs.at[rows, at].set(logprobs, mode="drop"),
    )
    return state.replace(top=top)


def _count(
    state: DecodeState,
    proposal: Proposal,
    verdict: Verdict,
    n_committed: Array,
    width: int,
) -> RowStats:
    stats = state.stats
    running = (state.status == Status.RUNNING).astype(jnp.int32)
    verified = proposal.n_valid * running
    accepted = verdict.n_accepted * running
    position = jnp.arange(stats.verified_at.shape[1])[None, :]
    scored, kept = position < verified[:, None], position < accepted[:, None]
    reached = scored & (position <= accepted[:, None])
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
