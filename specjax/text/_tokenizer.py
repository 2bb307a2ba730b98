"""The tokenizer: text to ids and back."""

import functools
import hashlib
import json
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import tokenizers

from specjax.text._directory import Roles, read_directory
from specjax.text._gguf import build_tokenizer, token_id

# A template in a file of its own would be read instead of the one saved here.
_SHADOWING = ("chat_template.jinja", "chat_template.json")


class Tokenizer:
    """A tokenizer with the roles of its tokens and its chat template.

    Make one with `from_directory` or `from_gguf`. Two tokenizers are equal when
    they turn every text into the same ids, give the same roles to their tokens
    and have the same chat template.
    """

    def __init__(self, backend: tokenizers.Tokenizer, roles: Roles):
        """Wraps a `tokenizers.Tokenizer`; prefer the two constructors.

        Args:
          backend: the tokenizer, used as it is and not copied.
          roles: special ids and the chat template.
        """
        self._backend = backend
        self._roles = roles

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Reads ``tokenizer.json`` and, where there, the files next to it.

        ``tokenizer_config.json``, ``special_tokens_map.json`` and
        ``generation_config.json`` give the special ids; the chat template comes
        from ``chat_template.jinja``, ``chat_template.json`` or
        ``tokenizer_config.json``, in this order. Whether BOS is added to a text
        is decided by the post-processor of ``tokenizer.json`` alone.

        Args:
          path: a model's directory.

        Returns:
          The tokenizer.

        Raises:
          FileNotFoundError: the directory has no ``tokenizer.json``.
          ValueError: a file is malformed or names a token that does not exist.
        """
        return cls(*read_directory(Path(path)))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Self:
        """Rebuilds the tokenizer that is stored in a GGUF file.

        Byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``) are supported.
        Control tokens become special tokens and user-defined ones added tokens,
        so both are recognised inside text.

        Args:
          fields: the file's metadata as plain Python values, by full name
            (``tokenizer.ggml.model``, ``tokenizer.chat_template``, ...), such as
            ``{name: f.contents() for name, f in GGUFReader(path).fields.items()}``.

        Returns:
          The tokenizer.

        Raises:
          ValueError: a field is missing or malformed, or the kind of tokenizer or
            its pre-tokenizer is not supported.
        """
        backend = build_tokenizer(fields)
        n_tokens = len(fields["tokenizer.ggml.tokens"])
        ends = [
            token_id(fields, f"{name}_token_id", n_tokens) for name in ("eos", "eot")
        ]
        template = fields.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise ValueError(
                "tokenizer.chat_template must be a string, got "
                f"{type(template).__name__}"
            )
        roles = Roles(
            bos=token_id(fields, "bos_token_id", n_tokens),
            eos=ends[0],
            eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
            pad=token_id(fields, "padding_token_id", n_tokens),
            chat_template=template,
        )
        return cls(backend, roles)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The wrapped `tokenizers.Tokenizer`; changing it changes this one."""
        return self._backend

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the highest id plus one."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    @property
    def bos_id(self) -> int | None:
        """The id that starts a text, or None."""
        return self._roles.bos

    @property
    def pad_id(self) -> int | None:
        """The id that fills a batch, or None."""
        return self._roles.pad

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a text; empty where no file names one."""
        return self._roles.eos_ids

    @property
    def bos_token(self) -> str | None:
        """The token that starts a text, or None."""
        return None if self.bos_id is None else self.id_to_token(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        """The end token that chat templates print, or None."""
        eos = self._roles.eos
        return None if eos is None else self.id_to_token(eos)

    @property
    def pad_token(self) -> str | None:
        """The token that fills a batch, or None."""
        return None if self.pad_id is None else self.id_to_token(self.pad_id)

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, or None."""
        return self._roles.chat_template

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out with ``skip_special_tokens=True``."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(ident for ident, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turns text into ids.

        Special tokens written out in `text` are recognised as such. The ids are
        those of `transformers`; like there, a byte for which a vocabulary has no
        token and no unknown token is left out (SmolLM2 lacks six control
        characters).

        Args:
          text: any text; it may be empty.
          add_special_tokens: let the post-processor add BOS or EOS where the
            tokenizer does so. Pass False for a text made by a chat template,
            which already holds them.

        Returns:
          The ids.

        Raises:
          TypeError: `text` is not a string.
          ValueError: `text` holds a lone surrogate, which is not text.
        """
        check_text(text, "the text to encode")
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Turns ids into text.

        Args:
          ids: token ids; bytes that are not UTF-8 come out as U+FFFD.
          skip_special_tokens: leave out the tokens of `special_ids`.

        Returns:
          The text.

        Raises:
          TypeError: an id is not an integer.
          ValueError: an id has no token.
        """
        return self._backend.decode(
            self.check_ids(ids), skip_special_tokens=skip_special_tokens
        )

    def check_ids(self, ids: Iterable[int]) -> list[int]:
        """The ids as plain integers.

        Args:
          ids: Python or NumPy integers.

        Returns:
          The same ids as a list.

        Raises:
          TypeError: an id is not an integer.
          ValueError: an id has no token.
        """
        checked = []
        for ident in ids:
            if isinstance(ident, bool):
                raise TypeError("token ids must be integers, got a bool")
            try:
                value = operator.index(ident)
            except TypeError as error:
                raise TypeError(
                    f"token ids must be integers, got {type(ident).__name__}: pass a "
                    "flat list or a one-dimensional integer array"
                ) from error
            if self.id_to_token(value) is None:
                raise ValueError(
                    f"the id {value} has no token; this tokenizer's ids are 0 to "
                    f"{self.vocab_size - 1}: mask the padding rows of the logits, or "
                    "load the tokenizer that belongs to the model"
                )
            checked.append(value)
        return checked

    def id_to_token(self, ident: int) -> str | None:
        """The token of an id as the vocabulary spells it, or None."""
        # The backend takes unsigned 32-bit numbers and overflows on others.
        return self._backend.id_to_token(ident) if 0 <= ident < 2**32 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    @functools.cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for ident in range(self.vocab_size):
            token = self.id_to_token(ident)
            # JSON keeps a missing token apart from an empty one, and a token with
            # a line break in it apart from two tokens.
            digest.update(json.dumps(token).encode("ascii") + b"\n")
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """A hash of which token each id stands for.

        Two tokenizers with the same fingerprint give ids the same meaning, as
        speculative decoding needs of a target and its drafter.

        Returns:
          64 hexadecimal digits (SHA-256).
        """
        return self._fingerprint

    def first_difference(
        self, other: "Tokenizer"
    ) -> tuple[int, str | None, str | None] | None:
        """The first id that stands for different tokens in two tokenizers.

        Args:
          other: the tokenizer to compare with.

        Returns:
          The id with this tokenizer's and the other's token for it (None where it
          has none), or None where all ids agree.
        """
        for ident in range(max(self.vocab_size, other.vocab_size)):
            mine, theirs = self.id_to_token(ident), other.id_to_token(ident)
            if mine != theirs:
                return ident, mine, theirs
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``.

        `from_directory` reads an equal tokenizer back.

        Args:
          path: the directory, made where it does not exist.

        Raises:
          ValueError: the directory holds a chat template in a file of its own,
            which would be read instead of this tokenizer's.
        """
        directory = Path(path)
        for name in _SHADOWING:
            if (directory / name).exists():
                raise ValueError(
                    f"{directory} holds {name}, which would be read instead of the "
                    "chat template saved here: remove it or save elsewhere"
                )
        directory.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            # Not only the one of eos_token: models may end a text in several ways.
            "eos_token_id": list(self.eos_ids),
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
        (directory / "tokenizer_config.json").write_text(text, "utf-8")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        return self is other or (
            self._roles == other._roles
            and self._backend.to_str() == other._backend.to_str()
        )

    def __hash__(self) -> int:
        return hash((self._roles, self._fingerprint))

    def __repr__(self) -> str:
        return (
            f"Tokenizer(vocab_size={self.vocab_size}, bos_id={self.bos_id}, "
            f"eos_ids={self.eos_ids}, pad_id={self.pad_id})"
        )


def check_text(text: object, what: str) -> None:
    """Checks that a value is text that can be written as UTF-8.

    Args:
      text: the value.
      what: what it is, for the message.

    Raises:
      TypeError: it is not a string.
      ValueError: it holds a lone surrogate.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"{what} must be a str, got {type(text).__name__}: decode bytes first"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds the lone surrogate U+{ord(text[error.start]):04X} at "
            f"character {error.start}, which is not text: read the source with "
            "errors='replace'"
        ) from error
