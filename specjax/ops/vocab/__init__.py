"""Reductions over a vocabulary row."""

from specjax.ops.vocab.api import (
    argmax,
    lanes_log_normalizer,
    log_normalizer,
    top_ids,
    total_mass,
)

__all__ = [
    "argmax",
    "lanes_log_normalizer",
    "log_normalizer",
    "top_ids",
    "total_mass",
]
