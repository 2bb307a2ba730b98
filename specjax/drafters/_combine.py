"""Drafters made of drafters."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from specjax.drafters._protocol import (
    BoundDrafter,
    DraftContext,
    Drafter,
    DrafterSpec,
    DrawKind,
    Proposal,
    check_gamma,
    inherited,
    match_noise,
    unbind,
)
from specjax.trees import Topology
from specjax.typing import Array, Params


def truncate(drafter: Drafter | BoundDrafter, gamma: int) -> BoundDrafter:
    """Cuts a drafter's drafts to a length.

    Args:
      drafter: any drafter.
      gamma: draft tokens a pass, at most the drafter's own.

    Returns:
      The drafter with its parameters.

    Raises:
      ValueError: gamma is out of range.
    """
    inner, params = unbind(drafter, None)
    check_gamma(gamma)
    if gamma > inner.spec.gamma:
        raise ValueError(
            f"{gamma=} is more than the {inner.spec.gamma} drafts that "
            f"{inner.spec.name!r} makes; make it with a larger gamma."
        )
    return BoundDrafter(_truncate(inner, gamma), params)


@functools.cache
def _truncate(inner: Drafter, gamma: int) -> Drafter:
    def propose(params: Params | None, state: object, context: DraftContext):
        proposal, state = inner.propose(params, state, _within(context, gamma))
        cut = lambda x, n=gamma: None if x is None else x[:, :n]
        proposal = Proposal(
            tokens=proposal.tokens[:, :gamma],
            logprobs=cut(proposal.logprobs),
            n_valid=jnp.minimum(proposal.n_valid, gamma),
            confidence=cut(proposal.confidence),
            parents=cut(proposal.parents),
            cache=proposal.cache,
            hidden=cut(proposal.hidden, gamma + 1),
        )
        return proposal, state

    spec = inner.spec
    coupled = inner.coupled
    return inner._replace(
        spec=DrafterSpec(
            name=f"{spec.name}[:{gamma}]",
            gamma=gamma,
            draws=spec.draws,
            **(inherited(inner) | _first_nodes(inner, gamma)),
            bank=tuple(n for n in spec.bank if n < gamma),
        ),
        propose=propose,
        coupled=None if coupled is None else lambda: _truncate(coupled(), gamma),
    )


def _first_nodes(inner: Drafter, gamma: int) -> dict[str, Any]:
    """What is left of a drafter's static tree."""
    topology = inner.spec.topology
    if topology is None:
        return {"depth": min(inner.spec.depth, gamma)}
    first = Topology(topology.parents[:gamma], topology.ranks[:gamma])
    return {"topology": first, "depth": first.max_depth}


def fallback(
    first: Drafter | BoundDrafter, second: Drafter | BoundDrafter, *, least: int = 1
) -> BoundDrafter:
    """Takes the first drafter's draft where it is long enough, else the second's.

    Row by row. The second is not asked about rows that the first has a draft for, so a
    draft model rests while retrieval finds something.

    Args:
      first: asked first; cheap, as ``suffix`` or ``prompt_lookup``.
      second: asked about the other rows.
      least: drafts of the first that are enough.

    Returns:
      The drafter, with both parameters.

    Raises:
      ValueError: ``least`` is more than the first drafts, or a drafter begins the
        target's pass itself, which cannot be shared.
    """
    (one, params_one), (two, params_two) = unbind(first, None), unbind(second, None)
    check_gamma(least)
    if least > one.spec.gamma:
        raise ValueError(
            f"{least=} is more than the {one.spec.gamma} drafts that "
            f"{one.spec.name!r} makes, so its drafts would never be taken."
        )
    for it in (one, two):
        if it.spec.exit_block:
            raise ValueError(
                f"drafter {it.spec.name!r} begins the target's pass with its own "
                "drafts and cannot be one of two; use layer_skip or model instead."
            )
    params = {"first": params_one, "second": params_two}
    return BoundDrafter(_fallback(one, two, least), params)


@functools.cache
def _fallback(one: Drafter, two: Drafter, least: int) -> Drafter:
    gamma = max(one.spec.gamma, two.spec.gamma)
    kinds: list[DrawKind] = [one.spec.draws, two.spec.draws]
    drawing: list[DrawKind] = [kind for kind in kinds if kind != "point"]
    if len(set(drawing)) > 1:
        raise ValueError("One drafter samples and the other is coupled: use one form.")
    spec = DrafterSpec(
        name=f"fallback({one.spec.name}, {two.spec.name})",
        gamma=gamma,
        draws=drawing[0] if drawing else "point",
        **inherited(one, two),
    )

    def propose(params: Params, state: tuple, context: DraftContext):
        a, b = state
        near, a = one.propose(params["first"], a, _within(context, one.spec.gamma))
        enough = near.n_valid >= least
        inside = _within(context, jnp.where(enough, 0, two.spec.gamma))
        if near.cache is not None and inside.target is not None:
            inside = inside._replace(target=inside.target._replace(cache=near.cache))
        far, b = two.propose(params["second"], b, inside)
        return _choose(enough, near, far, gamma), (a, b)

    def both(name: str):
        """Calls one function of both drafters: (params, state, ...) -> state."""
        left, right = getattr(one, name), getattr(two, name)
        return lambda params, state, *args: (
            left(params["first"], state[0], *args),
            right(params["second"], state[1], *args),
        )

    copies = one.copy_row, two.copy_row

    def copy_row(state, source, row, length):
        return tuple(
            copy(part, source, row, length)  # type: ignore[misc]
            for copy, part in zip(copies, state, strict=True)
        )

    couples = spec.draws == "sample"
    again = lambda: _fallback(
        match_noise(one, "gumbel"), match_noise(two, "gumbel"), least
    )
    return Drafter(
        spec=spec,
        init=lambda batch, capacity: (
            one.init(batch, capacity),
            two.init(batch, capacity),
        ),
        prefill=both("prefill"),
        reset_row=lambda state, row: (
            one.reset_row(state[0], row),
            two.reset_row(state[1], row),
        ),
        propose=propose,
        commit=both("commit"),
        copy_row=None if None in copies else copy_row,
        coupled=again if couples else None,
    )


def _within(context: DraftContext, most: Array | int) -> DraftContext:
    """Tells a drafter that at most so many of its drafts will be looked at."""
    budget = jnp.broadcast_to(jnp.asarray(most, jnp.int32), context.length.shape)
    if context.budget is not None:
        budget = jnp.minimum(budget, context.budget)
    return context._replace(budget=budget)


def _choose(enough: Array, near: Proposal, far: Proposal, gamma: int) -> Proposal:
    """Takes each row's proposal from one of two."""
    laws = near.logprobs, far.logprobs
    size = next((x.shape[-1] for x in laws if x is not None), None)
    near, far = _even(near, gamma, size), _even(far, gamma, size)

    def pick(x: Array | None, y: Array | None) -> Array | None:
        if x is None or y is None:
            return None
        return jnp.where(enough.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    if near.parents is not None or far.parents is not None:
        near, far = _as_tree(near), _as_tree(far)
    tokens, n_valid = pick(near.tokens, far.tokens), pick(near.n_valid, far.n_valid)
    assert tokens is not None and n_valid is not None
    return Proposal(
        tokens=tokens,
        logprobs=pick(near.logprobs, far.logprobs),
        n_valid=n_valid,
        confidence=pick(near.confidence, far.confidence),
        parents=pick(near.parents, far.parents),
        cache=near.cache if far.cache is None else far.cache,
    )


def _as_tree(proposal: Proposal) -> Proposal:
    """Gives a chain the parents that it has without saying so."""
    if proposal.parents is not None:
        return proposal
    parents = jnp.arange(proposal.tokens.shape[1], dtype=jnp.int32) - 1
    return proposal._replace(parents=jnp.broadcast_to(parents, proposal.tokens.shape))


def _even(proposal: Proposal, gamma: int, size: int | None) -> Proposal:
    """Pads a proposal, and spells out point masses where the other has laws."""
    fit = lambda x: jnp.pad(
        x, [(0, 0), (0, gamma - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    )
    tokens, laws = fit(proposal.tokens), proposal.logprobs
    if laws is not None:
        laws = fit(laws)
    elif size is not None:
        index = lax.broadcasted_iota(jnp.int32, (*tokens.shape, size), 2)
        laws = jnp.where(index == tokens[..., None], 0.0, -jnp.inf)
    confidence = jax.tree.map(fit, proposal.confidence)
    parents = proposal.parents
    if parents is not None:
        parents = fit(parents + 1) - 1
    return proposal._replace(
        tokens=tokens, logprobs=laws, confidence=confidence, parents=parents
    )
