"""The definition: the one warp, then the rule, over whole arrays."""

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp

from specjax.ops.vocab import log_normalizer
from specjax.typing import Array, Float, Int, UInt


class Drafts(Protocol):
    """What is read of a drafter's proposal, a chain."""

    @property
    def tokens(self) -> Int[Array, "B N"]:
        """Draft tokens."""
        ...

    @property
    def logprobs(self) -> Float[Array, "B N V"] | None:
        """Log-probabilities the tokens were drawn from, or None for point masses."""
        ...

    @property
    def n_valid(self) -> Int[Array, " B"]:
        """How many tokens of each row count."""
        ...

    @property
    def parents(self) -> Int[Array, "B N"] | None:
        """None: the drafts are a chain."""
        ...


class RowSettings(Protocol):
    """How each batch row samples; ``sampling.Settings`` is one."""

    @property
    def temperature(self) -> Float[Array, " B"]:
        """0 is the argmax."""
        ...

    @property
    def top_k(self) -> Int[Array, " B"]:
        """0 is off."""
        ...

    @property
    def top_p(self) -> Float[Array, " B"]:
        """1 is off."""
        ...

    @property
    def min_p(self) -> Float[Array, " B"]:
        """0 is off."""
        ...

    @property
    def seed(self) -> UInt[Array, " B"]:
        """Not looked at: noise is given."""
        ...


class Decision(NamedTuple):
    """What was decided of a pass.

    Attributes:
      n_accepted: drafts kept, [B] in [0, n_valid].
      next_token: the token after them, [B].
      log_normalizer: natural log of the sum of exp(logits), before temperature and
        filters, float32 [B, N+1]. It is not finite where the logits are no law (NaN,
        +inf, or -inf throughout); what is decided there is not to be used.
    """

    n_accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]
    log_normalizer: Float[Array, "B N1"]


def verify_sample_reference(
    logits: Float[Array, "B N1 V"],
    drafts: Drafts,
    settings: RowSettings,
    noise: Any,
    *,
    rule: str,
) -> Decision:
    """Warps, and asks the rule; see ``verify_sample``."""
    # What it is made of lies above the operations, and is looked for when called.
    from specjax.sampling import Settings, warp
    from specjax.verify import by_name

    decide = by_name(rule)
    logits = logits.astype(jnp.float32)
    scores = logits
    if not decide.greedy_only:
        scores = warp(logits, Settings(*(getattr(settings, x) for x in _SETTINGS)))
    verdict = decide.verify(drafts, scores, noise)
    return Decision(verdict.n_accepted, verdict.next_token, log_normalizer(logits))


_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed")
