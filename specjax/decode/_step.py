"""One speculative pass: propose, score, verify, commit."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode._commit import (
    append,
    append_top,
    count,
    emit,
    follow,
    score_of,
    truncate,
)
from specjax.decode._state import DecodeState, Status
from specjax.drafters import (
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    Scored,
    TargetView,
)
from specjax.models import Features, Target
from specjax.ops.vocab import log_normalizer, top_ids
from specjax.sampling import (
    advance_controls,
    apply_controls,
    gumbel_noise,
    uniform_noise,
    warp,
)
from specjax.trees import PassLayout, pass_layout, tree_arrays
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
    if drafter.spec.depth:
        # How many nodes fit is no matter of their depth: what is kept is cut later.
        room = jnp.where(room > 0, drafter.spec.gamma, 0)
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
        laws = jnp.isfinite(jnp.max(proposal.logprobs, axis=-1))
        if proposal.parents is not None:
            laws = jnp.take_along_axis(laws, proposal.parents + 1, axis=1)
        sound &= laws
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
    layout = _layout(proposal, drafter.spec)
    if layout is not None:
        logits, features, cache = target.forward(
            target_params, block, state.cache, layout=layout
        )
    elif proposal.hidden is None:
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
            parents=proposal.parents,
        )
        verdict = _judge(state, proposal, controlled, features, layout, rule)
        way = follow(proposal, verdict)
        emitted, logprobs, finite = emit(verdict, way, logits)
        score = score_of(controlled, way.rows, emitted)
        n_committed, status = truncate(
            state, verdict, way, emitted, finite, score > -jnp.inf
        )
    scored = None
    if drafter.spec.n_top:
        n_rows = jnp.where(state.status == Status.RUNNING, proposal.n_valid + 1, 0)
        scored = Scored(block, n_rows, top_ids(logits, drafter.spec.n_top))
    with jax.named_scope("commit"):
        state = append(state, proposal, verdict, way, emitted, logprobs, n_committed)
        state = append_top(state, way.rows, logits, n_committed)
        if verdict.path is not None:
            assert target.gather_path is not None
            kept = verdict.path[:, : drafter.spec.n_levels]
            cache = target.gather_path(cache, kept, width - 1)
        state = state.replace(
            controls=advance_controls(state.controls, emitted, n_committed),
            cache=target.commit(cache, n_committed),
            status=status,
            stats=count(state, proposal, verdict, way, n_committed, width),
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


def _layout(proposal: Proposal, spec: DrafterSpec) -> PassLayout | None:
    """Lays out the pass over a proposal; None where it is a chain."""
    if proposal.parents is None:
        return None
    n_nodes = proposal.tokens.shape[1]
    if spec.topology is not None and spec.topology.n_nodes == n_nodes:
        mask, offsets = pass_layout(spec.topology)
        return PassLayout(mask[None], offsets[None])
    arrays = tree_arrays(proposal.parents, proposal.n_valid)
    return pass_layout(arrays, max_depth=spec.n_levels)


def _fit(proposal: Proposal, n: int) -> Proposal:
    """Cuts or pads a proposal to n draft positions."""
    have = proposal.tokens.shape[1]

    def fit(x: Array, n: int = n, have: int = have) -> Array:
        pad = [(0, 0), (0, max(n - have, 0))] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x[:, :n], pad)

    hidden, parents = proposal.hidden, proposal.parents
    if parents is not None:
        # A pass without drafts is no tree.
        parents = fit(parents + 1) - 1 if n else None
    return Proposal(
        tokens=fit(proposal.tokens),
        logprobs=None if proposal.logprobs is None else fit(proposal.logprobs),
        n_valid=jnp.minimum(proposal.n_valid, n),
        confidence=None if proposal.confidence is None else fit(proposal.confidence),
        parents=parents,
        hidden=None if hidden is None else fit(hidden, n + 1, have + 1),
    )


def _judge(
    state: DecodeState,
    proposal: Proposal,
    logits: Float[Array, "B W V"],
    features: Features,
    layout: PassLayout | None,
    rule: VerifyRule,
) -> Verdict:
    """Runs the rule on warped scores, with noise only where something samples.

    Args:
      state: slots.
      proposal: the drafts.
      logits: the target's, after the rows' controls.
      features: the target's, of the same rows.
      layout: of the pass, None for a chain.
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
            offsets = jnp.arange(width) if layout is None else layout.offsets
            position = state.length[:, None] + jnp.broadcast_to(offsets, (batch, width))
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
