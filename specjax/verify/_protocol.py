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

    @property
    def parents(self) -> Int[Array, "B N"] | None:
        """Which token each token follows, or None for a chain."""
        ...


class Verdict(NamedTuple):
    """What a rule decided.

    Attributes:
      n_accepted: draft tokens kept, a prefix or a path, [B] in [0, n_valid].
      next_token: the token after them (correction or bonus), [B].
      info: diagnostics of the rule; unused fields vanish under jit.
        ``accept_prob`` [B, N] is the probability that position i is accepted given
        that those before it were; of a tree, that node i is given that its parent
        was. Rules with ``uniform`` noise also give what ``testing.oracle`` needs to
        know their law:

        * ``next_weights`` [B, V]: unnormalised law of ``next_token`` over
          ``noise.draw``, given ``noise.accept``;
        * ``test_prob`` [B, N]: the probability that ``noise.accept[:, i]`` passes
          position i's own test, where that is not ``accept_prob``;
        * ``row_weights`` [B, N, V]: where a position has no test of its own but a
          token drawn with ``noise.accept[:, i]``, that token's unnormalised law.
      path: of a tree, the nodes kept, from the pending token's child down; -1 from
        ``n_accepted`` on. None: the proposal is a chain, and a prefix is kept.
    """

    n_accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]
    info: dict[str, Array]
    path: Int[Array, "B N"] | None = None


class Evidence(NamedTuple):
    """What lossy rules look at besides the law that is sampled from.

    At temperature 0 the warped scores are a point mass and say nothing of how good
    another token would have been.

    Attributes:
      target_logprobs: log-softmax of the target's logits after what a request bans,
        forces or biases (-inf: the token may not stand there), at temperature 1 and
        without top-k, top-p and min-p. float32 [B, N+1, V], rows as in the scores.
      judge_scores: what the rule's ``judge`` said of each draft, [B, N]; None for
        rules that have none.
    """

    target_logprobs: Float[Array, "B N1 V"]
    judge_scores: Float[Array, "B N"] | None = None


class VerifyRule(NamedTuple):
    """A verify rule.

    Attributes:
      name: as in the registry.
      lossless: whether the output law is exactly the target's.
      noise: what ``verify`` takes as its third argument: ``none``, ``uniform``
        (``sampling.UniformNoise``) or ``gumbel`` (``sampling.gumbel_noise``,
        [B, N+1, Z], keyed by position).
      greedy_only: whether the rule needs temperature 0 in every row.
      verify: (proposal, target_scores [B, N+1, V], noise) -> Verdict. The scores are
        warped log-probabilities (natural log) up to a constant a row; row i scores
        draft token i, row n the token after n accepted ones; of a tree, row 0 scores
        the children of the pending token, row j + 1 those of node j. With
        ``evidence`` an ``Evidence`` is its fourth argument. ``gumbel`` noise of a
        tree is keyed by position too: rows of equal depth have the same.
      evidence: whether ``verify`` looks at ``Evidence``. Such a rule keeps more than
        the argmax at temperature 0 and must be run there as it is.
      judge: (features, tokens [B, N]) -> scores [B, N] for the evidence, or None. The
        features are the target's of the pass (``models.Features``), N+1 rows of it:
        row i predicted draft i, row i+1 has read it.
      trees: which trees the rule takes, and is exact for if it is lossless: ``none``
        (chains alone), ``static`` (a shape that does not depend on tokens drawn for
        it) or ``any``. Trees of point masses may have any shape for both kinds. See
        ``check_trees``.
      siblings: how the children of a node must be drawn where they are drawn:
        ``iid`` (independently, from one law), ``without_replacement`` (in turn, node
        order being the order of draws) or ``any``.
    """

    name: str
    lossless: bool
    noise: Literal["none", "uniform", "gumbel"]
    greedy_only: bool
    verify: Callable[..., Verdict]
    evidence: bool = False
    judge: Callable[[Any, Array], Array] | None = None
    trees: Literal["none", "static", "any"] = "none"
    siblings: Literal["any", "iid", "without_replacement"] = "any"


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
