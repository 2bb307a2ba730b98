"""Helpers, shipped, for tests of specjax and of what is built on it."""

from specjax.testing import oracle, planted, tables
from specjax.testing.tiny import tiny_model, tiny_tokenizer

__all__ = ["oracle", "planted", "tables", "tiny_model", "tiny_tokenizer"]
