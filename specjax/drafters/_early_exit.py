"""The target's own first blocks as the drafter, on the target's own cache.

Reference: Elhoushi et al., "LayerSkip", arXiv:2404.16710. Drafts leave the stack after
``exit_block`` blocks and are read by the final norm and the head; verification goes on
from the hidden states where they left, so no block runs twice on a token. The blocks'
keys and values are the target's own: there is no second cache to keep up.
"""

import functools

import jax.numpy as jnp
from jax import lax

from specjax.drafters._drawing import Drawing, Draws, check_draws
from specjax.drafters._protocol import (
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    check_gamma,
    n_wanted,
    pending_token,
    stateless,
)
from specjax.models import Target
from specjax.typing import Params


def early_exit(
    target: Target,
    exit_block: int,
    gamma: int = 4,
    *,
    n_ids: int | None = None,
    draws: Draws = "sample",
) -> Drafter:
    """Drafts with the first blocks of the target.

    A model that was not trained to be read there (layer dropout and an early-exit loss)
    drafts badly.

    Args:
      target: the target that it will draft for, and no other.
      exit_block: blocks that a draft runs through, in [1, blocks of the target).
      gamma: draft tokens a pass.
      n_ids: ids that have a token; None: all.
      draws: see ``drafters.model``.

    Returns:
      A drafter without state or parameters. Equal calls give the identical one.

    Raises:
      ValueError: the target cannot be cut, or a number is out of range.
    """
    check_gamma(gamma)
    check_draws(draws)
    halves, vocab_size = target.halves, target.spec.vocab_size
    if halves is None:
        raise ValueError(
            "This target cannot be left early: it has no halves. Use one without taps "
            "and without skipped layers."
        )
    if not 1 <= exit_block < halves.n_blocks:
        raise ValueError(
            f"{exit_block=} must be in [1, {halves.n_blocks}): some blocks draft, and "
            "some are left to verify."
        )
    n_ids = vocab_size if n_ids is None else n_ids
    if not 1 <= n_ids <= vocab_size:
        raise ValueError(f"{n_ids=} must be in [1, {vocab_size}].")
    return _early_exit(target, exit_block, gamma, n_ids, draws)


@functools.cache
def _early_exit(
    target: Target, exit_block: int, gamma: int, n_ids: int, draws: Draws
) -> Drafter:
    halves = target.halves
    assert halves is not None
    drawing = Drawing(target.spec.vocab_size, n_ids, draws)
    spec = DrafterSpec(
        name="early_exit",
        gamma=gamma,
        draws=drawing.kind,
        on_target=target.spec.cache_shape,
        exit_block=exit_block,
    )

    def propose(params: Params | None, context: DraftContext) -> Proposal:
        assert context.target is not None
        own, cache = context.target
        n_valid = n_wanted(context, gamma)
        batch = n_valid.shape[0]
        steps = jnp.max(n_valid)
        # Rows that draft less stay: what they would write could pass their capacity.
        wants = lambda i: (i < n_valid).astype(jnp.int32)
        token = pending_token(context)
        x, cache = halves.begin(own, token, cache, stop=exit_block)
        hidden = jnp.zeros((batch, gamma + 1, x.shape[-1]), x.dtype)
        hidden = hidden.at[:, :1].set(x)

        def step(carry):
            i, token, hidden, cache, drafts = carry
            last = lax.dynamic_slice_in_dim(hidden, i, 1, axis=1)
            logits = halves.read(own, last)[:, 0]
            drafts = drawing.put(drafts, logits, context, i)
            drafted = lax.dynamic_slice_in_dim(drafts.tokens, i, 1, axis=1)
            # A row that stays writes what stands there again: these blocks' part of
            # the cache is what verification goes on with.
            token = jnp.where(wants(i)[:, None] > 0, drafted, token)
            ahead = target.commit(cache, wants(i))
            x, cache = halves.begin(own, token, ahead, stop=exit_block)
            hidden = lax.dynamic_update_slice_in_dim(hidden, x, i + 1, axis=1)
            return i + 1, token, hidden, cache, drafts

        start = (jnp.int32(0), token, hidden, cache, drawing.empty(batch, gamma))
        more = lambda carry: carry[0] < steps
        _, _, hidden, cache, drafts = lax.while_loop(more, step, start)
        cache = target.commit(cache, -n_valid)
        return Proposal(*drafts, n_valid=n_valid, cache=cache, hidden=hidden)

    again = functools.partial(_early_exit, target, exit_block, gamma, n_ids, "coupled")
    return stateless(spec, propose, coupled=again if draws == "sample" else None)
