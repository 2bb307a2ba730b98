"""Helpers for tests of specjax and of what is built on it; shipped, like the library."""

from specjax.testing import planted
from specjax.testing.tiny import tiny_model, tiny_tokenizer

__all__ = ["planted", "tiny_model", "tiny_tokenizer"]
