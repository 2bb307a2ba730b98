"""The verify-rule contract.

A rule is a pure function of a proposal, the target's scores and explicit noise. It
never makes random numbers of its own, so that its law can be enumerated.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax.numpy as jnp

from specjax.typing import Array, Float, Int


class ProposalLike(Protocol):
    """The part of a drafter's proposal that rules read (see ``drafters``)."""

    @property
    def tokens(self) -> Int[Array, "B N"]:
        """Draft tokens."""
        ...

    @property
    def logprobs(self) -> Float[Array, "B N V"] | None:
        """Log-probabilities the tokens were drawn from, or None."""
        ...

    @property
    def n_valid(self) -> Int[Array, " B"]:
        """How many tokens of each row count."""
        ...


class Verdict(NamedTuple):
    """What a rule decided.

    Attributes:
      n_accepted: draft tokens kept, a prefix, [B] in [0, n_valid].
      next_token: the token after them (correction or bonus), [B].
      info: diagnostics of the rule; unused fields vanish under jit. Chain rules give
        ``accept_prob`` [B, N], the probability that position i is accepted given
        that those before it were.
    """

    n_accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]
    info: dict[str, Array]


class VerifyRule(NamedTuple):
    """A verify rule.

    Attributes:
      name: as in the registry.
      lossless: whether the output law is exactly the target's.
      noise: what ``verify`` takes as its third argument: ``none``, ``uniform``
        (``sampling.UniformNoise``) or ``gumbel`` ([B, N+1, V], keyed by position).
      greedy_only: whether the rule needs temperature 0 in every row.
      verify: (proposal, target_scores [B, N+1, V], noise) -> Verdict. The scores are
        warped log-probabilities (natural log) up to a constant a row; row i scores
        draft token i, row n the token after n accepted ones.
    """

    name: str
    lossless: bool
    noise: Literal["none", "uniform", "gumbel"]
    greedy_only: bool
    verify: Callable[[Any, Array, Any], Verdict]


def accepted_prefix(accept: Array, n_valid: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns how many leading drafts are accepted.

    Args:
      accept: whether each draft passes its test, bool [B, N].
      n_valid: drafts of each row that count, [B].

    Returns:
      The length of the leading run of accepted, valid drafts.
    """
    n_drafts = accept.shape[1]
    valid = jnp.arange(n_drafts)[None, :] < n_valid[:, None]
    return jnp.sum(jnp.cumprod((accept & valid).astype(jnp.int32), axis=1), axis=1)
