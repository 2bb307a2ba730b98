"""Models as drafters of each other, and of themselves."""

from typing import Any, Protocol

from specjax.drafters._model import Draws, model
from specjax.drafters._protocol import BoundDrafter
from specjax.models import DecoderConfig, Target
from specjax.typing import Params


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


def from_model(
    target: ModelLike, draft: ModelLike, gamma: int = 4, *, draws: Draws = "sample"
) -> BoundDrafter:
    """Makes a loaded model the drafter of another, after comparing their tokens.

    Args:
      target: the model to decode with.
      draft: the smaller one. Its logits may be padded to another width than the
        target's: what lies beyond the tokenizer is never drafted.
      gamma: draft tokens a pass.
      draws: see ``drafters.model``.

    Returns:
      The drafter with the draft model's parameters; pass it as ``drafter``.

    Raises:
      ValueError: one has no tokenizer, or an id means different tokens in them.
    """
    sizes = []
    for it in (target, draft):
        if it.tokenizer is None:
            raise ValueError(
                f"{it.name} was loaded without a tokenizer, so nothing says that its "
                "ids mean what the other's do; load both with theirs."
            )
        sizes.append(min(it.tokenizer.vocab_size, it.target.spec.vocab_size))
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
        n_ids=min(sizes),
        draws=draws,
    )
    return BoundDrafter(drafter, draft.params)
