"""A cheaper form of the target as its drafter, on the target's own cache.

Drafts attend to the keys and values that the target itself computed for the committed
text, and write their own behind it, where the pass that verifies them writes over
theirs: there is no second cache, no second prefill, and nothing to catch up with.

References: Zhang et al., "Draft & Verify", arXiv:2309.08168; Sadhukhan et al.,
"MagicDec", arXiv:2408.11049; Tiwari et al., "QuantSpec", arXiv:2502.10424.
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


def self_draft(
    form: Target,
    gamma: int = 4,
    *,
    n_ids: int | None = None,
    draws: Draws = "sample",
    name: str = "self_draft",
) -> Drafter:
    """Drafts with another form of the target: fewer layers, bits or keys.

    Args:
      form: functions that run on the target's cache; the parameters are the drafter's,
        or the target's own where it has none.
      gamma: draft tokens a pass, each one pass of the form.
      n_ids: ids that have a token; None: all.
      draws: see ``drafters.model``.
      name: for statistics and messages.

    Returns:
      A drafter without state. Equal calls give the identical one.

    Raises:
      ValueError: a number is out of range, ``draws`` is not known, or the form runs on
        no cache but its own.
    """
    check_gamma(gamma)
    check_draws(draws)
    vocab_size = form.spec.vocab_size
    n_ids = vocab_size if n_ids is None else n_ids
    if not 1 <= n_ids <= vocab_size:
        raise ValueError(f"{n_ids=} must be in [1, {vocab_size}].")
    if form.spec.cache_kind != "kv" or not form.spec.cache_shape:
        raise ValueError(
            f"{name!r} would draft on the target's cache, and this form (cache of kind "
            f"{form.spec.cache_kind!r}) runs on no other's; use drafters.model."
        )
    return _self_draft(form, gamma, n_ids, draws, name)


@functools.cache
def _self_draft(
    form: Target, gamma: int, n_ids: int, draws: Draws, name: str
) -> Drafter:
    drawing = Drawing(form.spec.vocab_size, n_ids, draws)
    spec = DrafterSpec(
        name=name, gamma=gamma, draws=drawing.kind, on_target=form.spec.cache_shape
    )

    def propose(params: Params | None, context: DraftContext) -> Proposal:
        assert context.target is not None
        own, cache = context.target
        own = own if params is None else params
        n_valid = n_wanted(context, gamma)
        steps = jnp.max(n_valid)
        # Rows that draft less stay: what they would write could pass their capacity.
        wants = lambda i: (i < n_valid).astype(jnp.int32)

        def step(carry):
            i, token, cache, drafts = carry
            logits, _, cache = form.forward(own, token, cache)
            drafts = drawing.put(drafts, logits[:, 0], context, i)
            token = lax.dynamic_slice_in_dim(drafts.tokens, i, 1, axis=1)
            return i + 1, token, form.commit(cache, wants(i)), drafts

        empty = drawing.empty(n_valid.shape[0], gamma)
        start = (jnp.int32(0), pending_token(context), cache, empty)
        more = lambda carry: carry[0] < steps
        _, _, cache, drafts = lax.while_loop(more, step, start)
        return Proposal(*drafts, n_valid=n_valid, cache=form.commit(cache, -n_valid))

    again = functools.partial(_self_draft, form, gamma, n_ids, "coupled", name)
    return stateless(spec, propose, coupled=again if draws == "sample" else None)
