"""A tiny random model with a tokenizer, for tests that run the whole loop."""

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.models import DecoderConfig, decoder_target, init_params
from specjax.text import Tokenizer
from specjax.text._directory import Roles
from specjax.weights import Model

# Readable bytes first, so that a small vocabulary is readable text.
_BYTES = (
    *range(32, 127),
    10,
    *(b for b in range(256) if b != 10 and not 32 <= b < 127),
)


def tiny_tokenizer(vocab_size: int = 256, eos_ids: Sequence[int] = ()) -> Tokenizer:
    """Makes a byte-level tokenizer without merges, of which every id decodes.

    Id 0 is the space, ids 0 to 94 are printable ASCII in its order, 95 is the line
    break, the rest are the other bytes. With 256 ids every text can be encoded; with
    fewer the bytes beyond are left out.

    Args:
      vocab_size: ids, 1 to 256.
      eos_ids: ids that end a text. They are ordinary bytes otherwise.

    Returns:
      The tokenizer.

    Raises:
      ValueError: the size is out of range.
    """
    if not 1 <= vocab_size <= 256:
        raise ValueError(f"{vocab_size=} must be in [1, 256]: an id is a byte.")
    spelling = _byte_spelling()
    vocab = {spelling[byte]: i for i, byte in enumerate(_BYTES[:vocab_size])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    ends = tuple(eos_ids)
    return Tokenizer(backend, Roles(eos=ends[0] if ends else None, eos_ids=ends))


def tiny_model(
    seed: int = 0,
    *,
    vocab_size: int = 256,
    width: int = 32,
    windows: tuple[int | None, ...] = (),
    dtype: str = "float32",
    eos_ids: Sequence[int] = (),
    max_context: int = 512,
) -> Model:
    """Makes a random two-layer decoder that compiles in about a second.

    Equal arguments but the seed share their Target, hence their compiled programs.

    Args:
      seed: of the parameters.
      vocab_size: rows of the embedding and ids of the tokenizer, at most 256.
      width: model width, a multiple of 16.
      windows: sliding window of each of the two layers; empty for full attention.
      dtype: float32 or bfloat16.
      eos_ids: ids that end a text.
      max_context: longest context.

    Returns:
      The model; its text is bytes (see ``tiny_tokenizer``) and it has no chat template.
    """
    config = DecoderConfig(
        vocab_size=vocab_size,
        width=width,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_width=16,
        ff_width=2 * width,
        max_context=max_context,
        windows=windows,
        dtype=dtype,
        family="tiny",
    )
    return Model(
        name=f"tiny-{seed}",
        config=config,
        target=decoder_target(config),
        params=init_params(config, seed),
        tokenizer=tiny_tokenizer(vocab_size, eos_ids),
        chat_template=None,
        eos_ids=tuple(eos_ids),
    )


def _byte_spelling() -> dict[int, str]:
    """How byte-level vocabularies spell each byte (GPT-2's printable stand-ins)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spelling, n = {}, 0
    for byte in range(256):
        if byte in plain:
            spelling[byte] = chr(byte)
        else:
            spelling[byte] = chr(256 + n)
            n += 1
    return spelling
