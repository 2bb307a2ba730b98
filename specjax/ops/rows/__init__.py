"""Sums along a row whose order of addition is written down."""

from specjax.ops.rows.api import row_sum

__all__ = ["row_sum"]
