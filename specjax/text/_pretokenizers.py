"""Byte-level pre-tokenizers by the name that GGUF files give them.

A GGUF file holds the tokens and the merges of a byte-level BPE, but of the
step that cuts text into words it holds only a name (``tokenizer.ggml.pre``).
The patterns below are those of the published ``tokenizer.json`` files.
"""

import dataclasses
from collections.abc import Callable

from tokenizers import Regex, normalizers, pre_tokenizers

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
# Qwen2 cuts numbers into single digits; the rest is the pattern of Llama 3.
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _gpt2()]
    )


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@dataclasses.dataclass(frozen=True)
class PreTokenizerSpec:
    """How a named kind of byte-level BPE treats text before the merges.

    Attributes:
      build: makes the pre-tokenizer.
      normalizer: makes the normaliser, or None where the text is left as it is.
      ignore_merges: a word that is itself a token is taken whole, whatever the
        merges would make of it.
      add_bos: whether a file that does not say so starts texts with BOS.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = PreTokenizerSpec(_gpt2)
_SINGLE_DIGITS = PreTokenizerSpec(_single_digits)
_LLAMA3 = PreTokenizerSpec(
    lambda: _split_by(_LLAMA3_PATTERN), ignore_merges=True, add_bos=True
)
_QWEN2 = PreTokenizerSpec(lambda: _split_by(_QWEN2_PATTERN), normalizers.NFC)

PRE_TOKENIZERS: dict[str, PreTokenizerSpec] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "phi-2": _GPT2,
    "qwen2": _QWEN2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
}
