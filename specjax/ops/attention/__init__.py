"""Attention of a pass's new rows over a fixed-size, length-bounded cache."""

from specjax.ops.attention.api import KV_BLOCK, cached_attention
from specjax.ops.attention.reference import cached_attention_reference

__all__ = ["KV_BLOCK", "cached_attention", "cached_attention_reference"]
