"""Text on the host: tokenizers, chat templates, streaming, prompt files."""

from specjax.text._chat import ChatTemplate
from specjax.text._detokenize import IncrementalDetokenizer
from specjax.text._records import BadRecord, Record, read_records
from specjax.text._settings import check_settings
from specjax.text._stop import StopStringMatcher, TextStream
from specjax.text._token_mask import TokenMask
from specjax.text._tokenizer import Tokenizer

__all__ = [
    "BadRecord",
    "ChatTemplate",
    "IncrementalDetokenizer",
    "Record",
    "StopStringMatcher",
    "TextStream",
    "TokenMask",
    "Tokenizer",
    "check_settings",
    "read_records",
]
