"""K-SEQ: children drawn independently, tested against one discounted ratio."""

import jax.numpy as jnp
from jax import lax

from specjax.sampling import UniformNoise
from specjax.typing import Array, Float
from specjax.verify._laws import of_tokens
from specjax.verify._protocol import ProposalLike, Verdict, VerifyRule
from specjax.verify._rejection import reject
from specjax.verify._tree_rows import pass_in_turn, read_rows, reject_tree
from specjax.verify._trees import Nodes, at_parent, read_nodes

# Halvings of the interval that rho lies in; leaves k / 2^24 of it.
_N_HALVINGS = 24


def _k_seq(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
) -> Verdict:
    """Accepts children by the ratio p / (rho q); see ``k_seq``."""
    if proposal.parents is None:
        return reject(proposal, target_scores, noise, leniency=1.0)
    if proposal.logprobs is None:
        return reject_tree(proposal, target_scores, noise, siblings="iid")
    nodes, rows = read_nodes(proposal), read_rows(proposal, target_scores)
    assert rows.q is not None
    n_children = _n_children(nodes, rows.p.dtype)
    rho = discount(rows.p, rows.q, n_children)
    accepted = jnp.minimum(rows.q, rows.p / rho[..., None])
    # Of k children the mass accepted is 1 - (1 - beta)^k, in proportion to what one
    # accepts. Rounding may leave less than nothing where all of p is.
    times = _repeats(jnp.sum(accepted, axis=-1), n_children)
    rest = jnp.maximum(rows.p - times[..., None] * accepted, 0)
    some = (n_children > 0) & (jnp.sum(rest, axis=-1) > 0)
    weights = jnp.where(some[..., None], rest, rows.p)
    tokens = proposal.tokens
    p_token = of_tokens(at_parent(nodes, rows.p), tokens)
    q_token = of_tokens(at_parent(nodes, rows.q), tokens) * at_parent(nodes, rho)
    verdict = pass_in_turn(nodes, noise, p_token, q_token, weights)
    return verdict._replace(info={**verdict.info, "rho": rho})


def _n_children(nodes: Nodes, dtype) -> Float[Array, "B N1"]:
    """Returns how many children each row has."""
    rows = jnp.arange(nodes.parents.shape[1] + 1)[None, :, None] - 1
    mine = (nodes.parents[:, None, :] == rows) & nodes.valid[:, None, :]
    return jnp.sum(mine, axis=-1).astype(dtype)


def _repeats(beta: Array, n_children: Array) -> Array:
    """Returns (1 - (1 - beta)^k) / beta, which is k at beta = 0."""
    beta = jnp.minimum(beta, 1)
    once = jnp.maximum(n_children, 1)  # 0 log 0 is no number
    either = -jnp.expm1(once * jnp.log1p(-beta))
    return jnp.where(beta > 0, either / jnp.where(beta > 0, beta, 1), n_children)


def discount(
    p: Float[Array, "*rows V"], q: Float[Array, "*rows V"], n_children: Array
) -> Float[Array, "*rows"]:
    """Finds the least rho of K-SEQ that leaves no negative residual, by halving.

    Args:
      p: the target's laws.
      q: the draft's.
      n_children: k of each row, [*rows], floating.

    Returns:
      rho in [1, k], from above: any larger one is exact as well.
    """
    low, high = jnp.ones_like(n_children), jnp.maximum(n_children, 1)

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        rho = (low + high) / 2
        beta = jnp.sum(jnp.minimum(q, p / rho[..., None]), axis=-1)
        enough = _repeats(beta, n_children) <= rho
        return jnp.where(enough, low, rho), jnp.where(enough, rho, high)

    return lax.fori_loop(0, _N_HALVINGS, halve, (low, high))[1]


#: Sun et al., arXiv:2310.15141 (SpecTr), K-SEQ. A child x passes with probability
#: min(1, p(x)/(rho q(x))), whatever became of its siblings; with
#: beta = sum of min(q, p/rho), one of k passes with 1 - (1 - beta)^k. If none does the
#: token is drawn from p - min(q, p/rho) (1 - (1 - beta)^k)/beta; rho in [1, k] is the
#: least that keeps this from being negative, which accepts 1 - 1/e of the best
#: possible or more. Lossless for children drawn independently from the proposal's own
#: ``logprobs``, in a tree whose shape does not depend on them. Point masses are tested
#: as by ``rejection``, which is what it is on chains. Finding rho reads the laws of a
#: tree 24 times.
k_seq = VerifyRule(
    name="k_seq",
    lossless=True,
    noise="uniform",
    greedy_only=False,
    verify=_k_seq,
    trees="static",
    siblings="iid",
)
