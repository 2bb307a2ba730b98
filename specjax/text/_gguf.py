"""A ``tokenizers.Tokenizer`` rebuilt from the metadata of a GGUF file."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from specjax.text._pretokenizers import PRE_TOKENIZERS

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_KINDS = (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE)


def build_tokenizer(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Rebuilds the tokenizer that a GGUF file describes.

    Args:
      fields: GGUF metadata as plain Python values, by its full name.

    Returns:
      A tokenizer that gives the same ids as the ``tokenizer.json`` that the file
      was made from.

    Raises:
      ValueError: a field is missing or malformed, or the kind of tokenizer is
        not supported.
    """
    kind = required(fields, "model", str)
    builders = {"gpt2": _build_byte_level, "llama": _build_sentencepiece}
    if kind not in builders:
        raise ValueError(
            f"{_PREFIX}model is {kind!r}; supported are {sorted(builders)}: load the "
            "model's tokenizer.json instead (Tokenizer.from_directory)"
        )
    tokens = _read_tokens(fields)
    types = _read_types(fields, len(tokens))
    tokenizer, add_bos = builders[kind](fields, tokens, types)
    # In two batches: every call rebuilds the table of added tokens.
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    _set_post_processor(tokenizer, fields, tokens, add_bos)
    return tokenizer


def required(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """The field ``tokenizer.ggml.<name>``, which must be there.

    Raises:
      ValueError: it is missing or is not of type `kind`.
    """
    value = optional(fields, name, kind)
    if value is None:
        raise ValueError(
            f"the GGUF metadata has no {_PREFIX}{name}: the file holds no complete "
            "tokenizer; load the model's tokenizer.json instead "
            "(Tokenizer.from_directory)"
        )
    return value


def optional(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """The field ``tokenizer.ggml.<name>``, or None where the file has none.

    Raises:
      ValueError: it is not of type `kind`.
    """
    value = fields.get(_PREFIX + name)
    if value is None:
        return None
    # bool is a subclass of int, and True is no token id.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(
            f"{_PREFIX}{name} must be a {kind.__name__}, got "
            f"{type(value).__name__} {str(value)[:60]!r}: pass plain Python values, "
            "such as GGUFReader.fields[name].contents()"
        )
    return value


def token_id(fields: Mapping[str, Any], name: str, n_tokens: int) -> int | None:
    """A field that holds a token id, or None where the file has none.

    Args:
      fields: GGUF metadata.
      name: the field's name after ``tokenizer.ggml.``.
      n_tokens: number of tokens in the file.

    Raises:
      ValueError: the id is not a token of the file.
    """
    value = optional(fields, name, int)
    if value is not None and not 0 <= value < n_tokens:
        raise ValueError(
            f"{_PREFIX}{name} is {value}, but the file has {n_tokens} tokens: the "
            "file is damaged; convert the model again"
        )
    return value


def _added(
    tokens: Sequence[str], types: Sequence[int], kind: int
) -> list[tokenizers.AddedToken]:
    return [
        tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == kind
    ]


def _read_tokens(fields: Mapping[str, Any]) -> list[str]:
    tokens = list(required(fields, "tokens", list))
    for i, token in enumerate(tokens):
        if not isinstance(token, str):
            raise ValueError(f"{_PREFIX}tokens[{i}] is {token!r}, not a string")
    if len(set(tokens)) != len(tokens):
        first: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if token in first:
                raise ValueError(
                    f"{_PREFIX}tokens holds {token!r} twice, as {first[token]} and "
                    f"{i}: its ids cannot be told apart; convert the model again"
                )
            first[token] = i
    return tokens


def _read_types(fields: Mapping[str, Any], n_tokens: int) -> list[int]:
    types = list(required(fields, "token_type", list))
    if len(types) != n_tokens:
        raise ValueError(
            f"{_PREFIX}token_type has {len(types)} entries for {n_tokens} tokens: the "
            "file is damaged; convert the model again"
        )
    unknown = sorted(set(types) - set(_KINDS), key=str)
    if unknown:
        raise ValueError(
            f"{_PREFIX}token_type holds {unknown[0]!r}; known are {list(_KINDS)}"
        )
    return types


def _build_byte_level(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE ("gpt2"); also whether it adds BOS where no field says so."""
    del types
    name = required(fields, "pre", str)
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"{_PREFIX}pre is {name!r}; known pre-tokenizers are "
            f"{sorted(PRE_TOKENIZERS)}: load the model's tokenizer.json instead "
            "(Tokenizer.from_directory)"
        )
    spec = PRE_TOKENIZERS[name]
    if optional(fields, "add_space_prefix", bool):
        raise ValueError(
            f"{_PREFIX}add_space_prefix is true for a byte-level tokenizer, which is "
            "not supported: load the model's tokenizer.json instead "
            "(Tokenizer.from_directory)"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _read_merges(fields, vocab)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, ignore_merges=spec.ignore_merges)
    )
    if spec.normalizer is not None:
        tokenizer.normalizer = spec.normalizer()
    tokenizer.pre_tokenizer = spec.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, spec.add_bos


def _read_merges(
    fields: Mapping[str, Any], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    merges = []
    for i, merge in enumerate(required(fields, "merges", list)):
        parts = merge.split(" ") if isinstance(merge, str) else ()
        if len(parts) != 2:
            raise ValueError(
                f"{_PREFIX}merges[{i}] is {merge!r}; expected two tokens with a space "
                "between them"
            )
        for token in (*parts, "".join(parts)):
            if token not in vocab:
                raise ValueError(
                    f"{_PREFIX}merges[{i}] is {merge!r}, but {token!r} is not a token: "
                    "the file is damaged; convert the model again"
                )
        merges.append((parts[0], parts[1]))
    return merges


def _build_sentencepiece(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE ("llama"); it adds BOS where no field says otherwise."""
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if fields.get(_PREFIX + name):
            raise ValueError(
                f"{_PREFIX}{name} is set, which is not supported for SentencePiece "
                "BPE: load the model's tokenizer.json instead "
                "(Tokenizer.from_directory)"
            )
    unknown = token_id(fields, "unknown_token_id", len(tokens))
    prefix = optional(fields, "add_space_prefix", bool)
    prefix = True if prefix is None else prefix
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_from_scores(fields, tokens, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    undo: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer, True


def _merges_from_scores(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best piece first.

    SentencePiece merges the pair whose joint piece has the best score, so a
    ranked list of pairs is the same rule. Of two pairs for one piece, the one
    with the longer left part is ranked first, which is what published
    ``tokenizer.json`` files do.
    """
    scores = required(fields, "scores", list)
    if len(scores) != len(tokens):
        raise ValueError(
            f"{_PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens: the "
            "file is damaged; convert the model again"
        )
    # Bytes, control tokens and the unknown token never come from merging text.
    mergeable = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    merges = [
        (score, cut, token[:cut], token[cut:])
        for token, score in mergeable.items()
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    merges.sort(key=lambda merge: (-merge[0], -merge[1]))
    return [(left, right) for _, _, left, right in merges]


def _set_post_processor(
    tokenizer: tokenizers.Tokenizer,
    fields: Mapping[str, Any],
    tokens: Sequence[str],
    add_bos_default: bool,
) -> None:
    """Adds BOS and EOS around encoded text where the file asks for it."""
    template, special = ["$A"], []
    add_bos = optional(fields, "add_bos_token", bool)
    wanted = {
        "bos": add_bos_default if add_bos is None else add_bos,
        "eos": bool(optional(fields, "add_eos_token", bool)),
    }
    for name, wants in wanted.items():
        if not wants:
            continue
        ident = token_id(fields, f"{name}_token_id", len(tokens))
        if ident is None:
            raise ValueError(
                f"the tokenizer adds a {name.upper()} token to every text, but the "
                f"GGUF metadata has no {_PREFIX}{name}_token_id: convert the model "
                f"again, or set {_PREFIX}add_{name}_token to false"
            )
        template.insert(0 if name == "bos" else len(template), name)
        # Named by role: a template cannot hold a token with a colon in it.
        special.append({"id": name, "ids": [ident], "tokens": [tokens[ident]]})
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special
        )
