"""Rules that pick the target's token at every position and keep what matches."""

import jax.numpy as jnp

from specjax.ops.vocab import argmax
from specjax.sampling import gumbel_argmax
from specjax.typing import Array, Float
from specjax.verify._protocol import (
    ProposalLike,
    Verdict,
    VerifyRule,
    accepted_prefix,
)
from specjax.verify._trees import at_parent, at_row, first_chance, read_nodes, walk


def _match(proposal: ProposalLike, chosen: Array) -> Verdict:
    """Accepts drafts equal to the target's own choice at their position."""
    if proposal.parents is not None:
        nodes = read_nodes(proposal)
        equal = proposal.tokens == at_parent(nodes, chosen)
        kept = walk(nodes, equal)
        accept_prob = first_chance(nodes, equal.astype(jnp.float32))
        return kept.verdict(at_row(chosen, kept.row), {"accept_prob": accept_prob})
    equal = proposal.tokens == chosen[:, : proposal.tokens.shape[1]]
    n_accepted = accepted_prefix(equal, proposal.n_valid)
    next_token = jnp.take_along_axis(chosen, n_accepted[:, None], axis=1)[:, 0]
    return Verdict(n_accepted, next_token, {"accept_prob": equal.astype(jnp.float32)})


def _greedy(
    proposal: ProposalLike, target_scores: Float[Array, "B N1 V"], noise: None
) -> Verdict:
    """Accepts the longest draft prefix of argmaxes; see ``greedy``."""
    return _match(proposal, argmax(target_scores))


def _coupled(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: Float[Array, "B N1 Z"],
) -> Verdict:
    """Accepts drafts equal to the Gumbel-argmax; see ``coupled``."""
    return _match(proposal, gumbel_argmax(target_scores, noise))


#: Keeps drafts that are the target's argmax (ties: lowest id) and continues with the
#: argmax. Lossless at temperature 0, the only one it allows. Follows any tree, into the
#: child that is its parent's argmax (equal siblings: the first).
greedy = VerifyRule(
    name="greedy",
    lossless=True,
    noise="none",
    greedy_only=True,
    verify=_greedy,
    trees="any",
)

#: Draws the target's token of every position with Gumbel noise keyed by (seed,
#: position) and keeps drafts equal to it. The output is a function of prefix, target
#: logits and seed alone: the same text with speculation on and off, for any drafter.
#: Lossless for any proposal; accepts a point mass x with probability p(x), the best
#: possible. Follows any tree: rows of one depth share their noise, and a path crosses
#: each depth once. References: Daliri, Musco and Suresh, arXiv:2408.07978.
coupled = VerifyRule(
    name="coupled",
    lossless=True,
    noise="gumbel",
    greedy_only=False,
    verify=_coupled,
    trees="any",
)
