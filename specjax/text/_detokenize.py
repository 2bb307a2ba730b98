"""Text from ids that arrive piece by piece."""

import codecs
import functools
import json
import re
from collections.abc import Iterable
from typing import Any, Protocol

from specjax.text._tokenizer import Tokenizer

# How many settled tokens a window keeps in front of the new ones, so that the
# decoder does not take the new ones for the start of the text.
_CONTEXT = 4

# A settled token is the index of the first character that it carries a part of,
# counted from the start of the text, or None where it carries none.
Starts = list[int | None]


class Stream(Protocol):
    """Decodes ids one at a time, and says which text each of them carries."""

    def feed(self, ident: int) -> tuple[str, Starts]:
        """Takes one id.

        Args:
          ident: a checked id that is not left out of the text.

        Returns:
          The text that became final, and for each id that became settled, in
          order, the index of the first character that it carries.
        """
        ...

    def finish(self) -> tuple[str, Starts]:
        """Ends the text; returns as `feed` does."""
        ...


class _ByteStream:
    """For byte-level tokenizers: a token is bytes, whatever stands around it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_chars = 0

    def feed(self, ident: int) -> tuple[str, Starts]:
        data = _token_bytes(self._tokenizer.id_to_token(ident) or "")
        if not data:
            return "", [None]
        started = bool(self._decoder.getstate()[0])
        text = self._decoder.decode(data[:1])
        # A first byte that does not fit what was started makes that a U+FFFD, which
        # this token has no part in. It is then a second character or starts one;
        # a byte that completes a character does neither.
        unfit = started and text and (len(text) == 2 or self._decoder.getstate()[0])
        start = self._n_chars + (1 if unfit else 0)
        text += self._decoder.decode(data[1:])
        self._n_chars += len(text)
        return text, [start]

    def finish(self) -> tuple[str, Starts]:
        return self._decoder.decode(b"", final=True), []


class _WindowStream:
    """For decoders that look at neighbours: decodes a window of recent tokens.

    A run of byte tokens (``<0xE4>``) is decoded as a whole, since one byte that
    does not fit turns all of the run into U+FFFD. Such a run is therefore held
    back until a token of another kind ends it.
    """

    def __init__(self, tokenizer: Tokenizer, *, byte_fallback: bool):
        self._tokenizer = tokenizer
        self._byte_fallback = byte_fallback
        self._context: list[int] = []
        self._run: list[int] = []
        self._n_chars = 0

    def feed(self, ident: int) -> tuple[str, Starts]:
        if self._byte_fallback and self._byte(ident) is not None:
            self._run.append(ident)
            return "", []
        run_text, starts = self.finish()
        text = self._new_text([ident])
        starts.append(self._n_chars if text else None)
        self._settle([ident], text)
        return run_text + text, starts

    def finish(self) -> tuple[str, Starts]:
        run, self._run = self._run, []
        if not run:
            return "", []
        text = self._new_text(run)
        places, n_whole = _run_places(bytes(self._byte(ident) or 0 for ident in run))
        # The decoder may have stripped the text's first space.
        stripped = n_whole - len(text)
        starts: Starts = [
            None if place < stripped else self._n_chars + place - stripped
            for place in places
        ]
        self._settle(run, text)
        return text, starts

    def _byte(self, ident: int) -> int | None:
        return _fallback_byte(self._tokenizer.id_to_token(ident))

    def _new_text(self, ids: list[int]) -> str:
        decode = self._tokenizer.decode
        before = decode(self._context)
        after = decode(self._context + ids)
        return after[len(before) :]

    def _settle(self, ids: list[int], text: str) -> None:
        self._context = (self._context + ids)[-_CONTEXT:]
        self._n_chars += len(text)


def make_stream(tokenizer: Tokenizer) -> Stream:
    """The stream for the kind of decoder that a tokenizer has.

    Args:
      tokenizer: the tokenizer.

    Returns:
      A fresh stream.

    Raises:
      ValueError: the decoder changes earlier text when more ids come, so its text
        cannot be given out piece by piece.
    """
    decoder = tokenizer.backend.decoder
    # What a pickle of the decoder holds: its part of tokenizer.json.
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    kinds = _decoder_kinds(state)
    if kinds == ["ByteLevel"]:
        return _ByteStream(tokenizer)
    return _WindowStream(tokenizer, byte_fallback="ByteFallback" in kinds)


def _decoder_kinds(decoder: dict[str, Any]) -> list[str]:
    """The steps of a decoder, all of them known to only ever add text."""
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type", "none") for step in steps]
    alone = ("none", "ByteLevel", "Metaspace", "WordPiece", "BPEDecoder")
    if len(kinds) == 1 and kinds[0] in alone:
        return kinds
    # After Fuse all of the text is one piece, so only the start may be changed.
    cut = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    before, after = steps[:cut], steps[cut + 1 :]
    fits = all(step["type"] in ("Replace", "ByteFallback") for step in before) and all(
        step["type"] == "Strip" and step["stop"] == 0 and step["start"] <= 1
        for step in after
    )
    if not fits:
        raise ValueError(
            f"the tokenizer's decoder has the steps {kinds}, whose text cannot be "
            "given out piece by piece: collect the ids and call Tokenizer.decode"
        )
    return kinds


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _token_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; an added token may be plain text."""
    alphabet = _byte_alphabet()
    if all(char in alphabet for char in token):
        return bytes(alphabet[char] for char in token)
    return token.encode("utf-8")


def _fallback_byte(token: str | None) -> int | None:
    """The byte of a token like ``<0x0A>``, or None for any other token."""
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token or "")
    return None if found is None else int(found[1], 16)


def _run_places(data: bytes) -> tuple[list[int], int]:
    """The character that each byte of a run belongs to, and their number."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        # One U+FFFD for each byte of the run.
        return list(range(len(data))), len(data)
    places = [i for i, char in enumerate(text) for _ in char.encode("utf-8")]
    return places, len(text)


class IncrementalDetokenizer:
    """Turns ids into text as they arrive, never printing half a character.

    All pieces together are ``tokenizer.decode(ids)``, however the ids are cut
    into pushes. A character whose bytes are spread over several tokens comes out
    with its last one; bytes that can no longer become a character come out as
    U+FFFD. The cost of a push does not depend on how many ids came before it.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        """Starts an empty text.

        Args:
          tokenizer: the tokenizer of the ids.
          skip_special_tokens: leave special tokens out of the text.

        Raises:
          ValueError: the tokenizer's text cannot be given out piece by piece.
        """
        self._tokenizer = tokenizer
        self._stream = make_stream(tokenizer)
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._flushed = False

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids.

        Args:
          ids: any number of token ids.

        Returns:
          The text that they make final, often empty.

        Raises:
          TypeError: an id is not an integer.
          ValueError: an id has no token, or the text was ended by `flush`.
        """
        if self._flushed:
            raise ValueError(
                "push after flush: the text has ended; use a new detokenizer for "
                "another one"
            )
        return "".join(
            self._stream.feed(ident)[0]
            for ident in self._tokenizer.check_ids(ids)
            if ident not in self._skipped
        )

    def flush(self) -> str:
        """Ends the text.

        Returns:
          What was held back; a second call returns an empty string.
        """
        if self._flushed:
            return ""
        self._flushed = True
        return self._stream.finish()[0]
