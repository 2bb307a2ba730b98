"""Helpers, shipped, for tests of specjax and of what is built on it."""

from specjax.testing import mutants, oracle, planted, tables, topology, tree_mutants
from specjax.testing.tiny import tiny_model, tiny_tokenizer

__all__ = [
    "mutants",
    "oracle",
    "planted",
    "tables",
    "tiny_model",
    "tiny_tokenizer",
    "topology",
    "tree_mutants",
]
