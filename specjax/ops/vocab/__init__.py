"""Reductions over a vocabulary row."""

from specjax.ops.vocab.api import argmax, log_normalizer

__all__ = ["argmax", "log_normalizer"]
