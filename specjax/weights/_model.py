"""The record that every loader returns."""

import dataclasses

import jax

from specjax.models import DecoderConfig, Target, decoder_target
from specjax.text import ChatTemplate, Tokenizer
from specjax.typing import Params


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A loaded model: pure functions, their parameters, and its text side.

    Attributes:
      name: what it was loaded as.
      config: the decoder.
      target: ``decoder_target(config)``.
      params: parameters of the target, placed.
      tokenizer: or None where it was loaded with ``with_tokenizer=False``.
      chat_template: or None where the model has none.
      eos_ids: ids that end a text; may be empty.
    """

    name: str
    config: DecoderConfig
    target: Target
    params: Params
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    eos_ids: tuple[int, ...]

    def __repr__(self) -> str:
        n_params = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        config = self.config
        return (
            f"Model({self.name!r}, {config.family}, {n_params / 1e6:.1f}M parameters, "
            f"{config.n_layers} layers of width {config.width}, {config.dtype}, "
            f"tokenizer={self.tokenizer!r})"
        )

    @property
    def n_ids(self) -> int:
        """How many ids have a token; a padded vocabulary has more logits."""
        size = self.target.spec.vocab_size
        return size if self.tokenizer is None else min(size, self.tokenizer.vocab_size)

    def need_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
          ValueError: the model was loaded without one.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"{self.name} was loaded without a tokenizer; load it with one to "
                "turn text into ids and back."
            )
        return self.tokenizer


@dataclasses.dataclass(frozen=True)
class TextSide:
    """Tokenizer, chat template and end ids, checked before tensors are read."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    eos_ids: tuple[int, ...]


def make_text_side(
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    *,
    origin: str,
    eos_ids: tuple[int, ...] | None = None,
) -> TextSide:
    """Checks a tokenizer against the decoder it belongs to.

    Args:
      config: the decoder.
      tokenizer: its tokenizer, or None.
      origin: the checkpoint, for messages.
      eos_ids: ids that end a text; None takes the tokenizer's.

    Returns:
      The parts of a Model that are about text.

    Raises:
      ValueError: the tokenizer has more ids than the embedding has rows, an end id
        is no row, or the chat template is malformed.
    """
    template = None
    if tokenizer is not None:
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"{origin}: the tokenizer has {tokenizer.vocab_size} ids and the "
                f"embedding {config.vocab_size} rows; they are not of one model."
            )
        if tokenizer.chat_template is not None:
            template = ChatTemplate.from_tokenizer(tokenizer)
        eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids
    eos_ids = eos_ids or ()
    beyond = [i for i in eos_ids if not 0 <= i < config.vocab_size]
    if beyond:
        raise ValueError(
            f"{origin}: end-of-text ids {beyond} are outside the vocabulary of "
            f"{config.vocab_size} rows."
        )
    return TextSide(tokenizer, template, eos_ids)


def make_model(
    name: str, config: DecoderConfig, params: Params, text: TextSide
) -> Model:
    """Puts a Model together."""
    return Model(
        name=name,
        config=config,
        target=decoder_target(config),
        params=params,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        eos_ids=text.eos_ids,
    )
