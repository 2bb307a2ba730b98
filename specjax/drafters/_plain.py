"""Plain decoding as a drafter: it proposes nothing."""

import functools

import jax.numpy as jnp

from specjax.drafters._protocol import (
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    stateless,
)
from specjax.typing import Params


@functools.cache
def plain() -> Drafter:
    """Decodes one token a pass.

    Returns:
      A drafter of gamma 0. Equal calls give the identical drafter.
    """

    def propose(params: Params | None, context: DraftContext) -> Proposal:
        batch = context.history.shape[0]
        return Proposal(
            tokens=jnp.zeros((batch, 0), jnp.int32),
            logprobs=None,
            n_valid=jnp.zeros((batch,), jnp.int32),
        )

    return stateless(DrafterSpec(name="plain", gamma=0), propose)
