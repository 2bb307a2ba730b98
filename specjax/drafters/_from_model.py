"""Models as drafters of each other, and of themselves."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax.drafters._drawing import Draws
from specjax.drafters._model import model
from specjax.drafters._protocol import BoundDrafter
from specjax.drafters._self_draft import self_draft
from specjax.models import (
    NO_SKIP,
    DecoderConfig,
    KVBudget,
    LayerSkip,
    Target,
    decoder_target,
)
from specjax.ops.linear import preferred_layout
from specjax.trees import Topology
from specjax.typing import Array, Params


class ModelLike(Protocol):
    """The part of a loaded model (``specjax.Model``) that drafters need."""

    @property
    def name(self) -> str:
        """What it was loaded as."""
        ...

    @property
    def config(self) -> DecoderConfig:
        """The decoder."""
        ...

    @property
    def target(self) -> Target:
        """Its functions."""
        ...

    @property
    def params(self) -> Params:
        """Their parameters."""
        ...

    @property
    def tokenizer(self) -> Any:
        """``text.Tokenizer`` or None."""
        ...

    @property
    def n_ids(self) -> int:
        """How many ids have a token."""
        ...


def from_model(
    target: ModelLike,
    draft: ModelLike,
    gamma: int | Topology = 4,
    *,
    draws: Draws = "sample",
) -> BoundDrafter:
    """Makes a loaded model the drafter of another, after comparing their tokens.

    Args:
      target: the model to decode with.
      draft: the smaller one. Its logits may be padded to another width than the
        target's: what lies beyond the tokenizer is never drafted.
      gamma: draft tokens a pass; or a tree.
      draws: see ``drafters.model``.

    Returns:
      The drafter with the draft model's parameters; pass it as ``drafter``.

    Raises:
      ValueError: one has no tokenizer, or an id means different tokens in them.
    """
    for it in (target, draft):
        if it.tokenizer is None:
            raise ValueError(
                f"{it.name} was loaded without a tokenizer, so nothing says that its "
                "ids mean what the other's do; load both with theirs."
            )
    difference = target.tokenizer.first_difference(draft.tokenizer)
    if difference is not None:
        ident, mine, theirs = difference
        raise ValueError(
            f"{draft.name} cannot draft for {target.name}: id {ident} is {mine!r} in "
            f"the target's vocabulary and {theirs!r} in the draft's. Use a draft model "
            "of the same tokenizer."
        )
    drafter = model(
        draft.target,
        gamma,
        vocab_size=target.target.spec.vocab_size,
        n_ids=min(target.n_ids, draft.n_ids),
        draws=draws,
    )
    return BoundDrafter(drafter, draft.params)


def layer_skip(
    target: ModelLike,
    gamma: int = 4,
    *,
    attention: Sequence[int] = (),
    ff: Sequence[int] = (),
    draws: Draws = "sample",
) -> BoundDrafter:
    """Makes a model its own drafter, with some of its sublayers left out.

    Reference: Zhang et al., "Draft & Verify", arXiv:2309.08168. It has neither cache
    nor parameters of its own.

    Args:
      target: the model.
      gamma: draft tokens a pass.
      attention: blocks whose attention drafts leave out.
      ff: blocks whose feed-forward network drafts leave out.
      draws: see ``drafters.model``.

    Returns:
      The drafter, which has no parameters but the target's.

    Raises:
      ValueError: nothing is left out, or what is left out is no block.
    """
    skip = LayerSkip(tuple(attention), tuple(ff))
    if skip == NO_SKIP:
        raise ValueError(
            "layer_skip leaves nothing out: a draft would cost what the target does; "
            "name blocks in attention= and ff=."
        )
    form = decoder_target(target.config, skip=skip)
    return BoundDrafter(
        self_draft(form, gamma, n_ids=target.n_ids, draws=draws, name="layer_skip"),
        None,
    )


def sparse_kv(
    target: ModelLike,
    gamma: int = 4,
    *,
    sinks: int = 4,
    window: int = 508,
    draws: Draws = "sample",
) -> BoundDrafter:
    """Makes a model its own drafter, attending to the text's start and end only.

    For contexts so long that reading the cache costs what reading the weights does: the
    cost of a draft stays the same however long the text is, so the gain grows with
    context and batch. Reference: Sadhukhan et al., "MagicDec", arXiv:2408.11049, with
    the bounded cache of Xiao et al., "StreamingLLM", arXiv:2309.17453; here drafts read
    those keys and values where they are, in the target's cache.

    Args:
      target: the model.
      gamma: draft tokens a pass.
      sinks: first tokens of the text that drafts attend to.
      window: last tokens that they attend to. The CPU and XLA read whole blocks of 256
        positions.
      draws: see ``drafters.model``.

    Returns:
      The drafter, which has no parameters but the target's.

    Raises:
      ValueError: a number is out of range, or no text is longer than the budget.
    """
    budget = KVBudget(sinks, window)
    budget.check()
    if sinks + window >= target.config.max_context:
        raise ValueError(
            f"sinks={sinks} and window={window} hold all of the "
            f"{target.config.max_context} positions that {target.name} is made for: a "
            "draft would cost what the target does. Use smaller ones."
        )
    form = decoder_target(target.config, budget=budget)
    return BoundDrafter(
        self_draft(form, gamma, n_ids=target.n_ids, draws=draws, name="sparse_kv"),
        None,
    )


def lower_precision(
    target: ModelLike,
    gamma: int = 4,
    *,
    dtype: str = "bfloat16",
    draws: Draws = "sample",
) -> BoundDrafter:
    """Makes a model its own drafter, in parameters of a smaller type.

    Args:
      target: the model.
      gamma: draft tokens a pass.
      dtype: of the draft: ``bfloat16``.
      draws: see ``drafters.model``.

    Returns:
      The drafter with a converted copy of the parameters.

    Raises:
      ValueError: the type is not smaller than the target's, or not known.
    """
    if dtype != "bfloat16" or target.config.dtype != "float32":
        raise ValueError(
            f"{dtype=} is no smaller type for a target of {target.config.dtype}; a "
            "float32 target can be drafted for in bfloat16."
        )
    layout = preferred_layout(jnp.dtype(dtype))
    config = dataclasses.replace(target.config, dtype=dtype, kernel_layout=layout)
    turned = layout != target.config.kernel_layout

    def convert(path: tuple, x: Array) -> Array:
        kernel = getattr(path[-1], "key", None) == "kernel"
        return (x.T if kernel and turned else x).astype(dtype)

    form = decoder_target(config)
    return BoundDrafter(
        self_draft(form, gamma, n_ids=target.n_ids, draws=draws, name=dtype),
        jax.tree_util.tree_map_with_path(convert, target.params),
    )
