"""The smallest set of largest scores whose weights reach a goal: top-k and top-p."""

from specjax.ops.keep_largest.api import keep_largest
from specjax.ops.keep_largest.reference import keep_largest_reference

__all__ = ["keep_largest", "keep_largest_reference"]
