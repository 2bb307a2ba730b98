"""Verification of a chain of drafts and the draw of what follows, logits to tokens."""

from specjax.ops.verify_sample.api import verify_sample
from specjax.ops.verify_sample.reference import Decision, verify_sample_reference

__all__ = ["Decision", "verify_sample", "verify_sample_reference"]
