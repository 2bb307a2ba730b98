"""The bytes that each token adds to a text."""

import itertools
import json
from collections.abc import Collection

from specjax.text._detokenize import _decoder_kinds, _fallback_byte, _token_bytes
from specjax.text._tokenizer import Tokenizer

# The bytes of each id; None for an id that must not stand in a text.
Spellings = list[bytes | None]

_PIECES = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")


def spellings(
    tokenizer: Tokenizer, left_out: Collection[int]
) -> tuple[Spellings, Spellings]:
    """The bytes that each id adds to a text, and those that it starts one with.

    The two differ where the decoder takes away a text's first space. Special tokens
    and the unknown token have no spelling.

    Args:
      tokenizer: the tokenizer.
      left_out: more ids that are not to have one.

    Returns:
      The bytes of each id within a text, and at its start.

    Raises:
      ValueError: what a token adds depends on more than whether it is the first.
    """
    model = tokenizer.backend.model
    unknown = getattr(model, "unk_token", None)
    silent = {*left_out, *tokenizer.special_ids}
    ids = [
        ident
        for ident in range(tokenizer.vocab_size)
        if ident not in silent and tokenizer.id_to_token(ident) not in (None, unknown)
    ]
    decoder = tokenizer.backend.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    kinds = _decoder_kinds(state)
    first: Spellings = [None] * tokenizer.vocab_size
    if kinds == ["ByteLevel"]:
        for ident in ids:
            first[ident] = _token_bytes(tokenizer.id_to_token(ident) or "")
        return first, first
    if not set(kinds) <= set(_PIECES):
        raise ValueError(
            f"the tokenizer's decoder has the steps {kinds}, with which the text of a "
            "token depends on its neighbours: use TokenMask.from_allowed, or a "
            "tokenizer of bytes or of pieces with spaces in them"
        )
    later: Spellings = [None] * tokenizer.vocab_size
    alone = _decoded(tokenizer, [[ident] for ident in ids])
    # A token to stand in front of the others, which are then not the first.
    words = (i for i, text in zip(ids, alone, strict=True) if text.isalnum())
    before = [*itertools.islice(words, 1)]
    behind = _decoded(tokenizer, [[*before, ident] for ident in ids])
    cut = len(tokenizer.decode(before))
    for ident, text, after in zip(ids, alone, behind, strict=True):
        byte = _fallback_byte(tokenizer.id_to_token(ident))
        if "ByteFallback" in kinds and byte is not None:
            # Alone, a byte of a longer character decodes to U+FFFD.
            later[ident] = bytes([byte])
            first[ident] = b"" if text == "" else bytes([byte])
        else:
            first[ident], later[ident] = text.encode(), after[cut:].encode()
    return later, first


def _decoded(tokenizer: Tokenizer, lists: list[list[int]]) -> list[str]:
    return tokenizer.backend.decode_batch(lists, skip_special_tokens=False)
