"""Writing a pass's keys and values into a layer's cache."""

from specjax.ops.write_rows.api import write_rows
from specjax.ops.write_rows.reference import write_rows_reference

__all__ = ["write_rows", "write_rows_reference"]
