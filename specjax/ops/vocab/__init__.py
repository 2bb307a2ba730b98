"""Reductions over a vocabulary row."""

from specjax.ops.vocab.api import (
    argmax,
    lanes_log_normalizer,
    log_normalizer,
    total_mass,
)

__all__ = ["argmax", "lanes_log_normalizer", "log_normalizer", "total_mass"]
