"""Compaction of a tree pass: accepted nodes move to where a chain's would stand."""

from specjax.ops.gather_path.api import gather_path
from specjax.ops.gather_path.reference import gather_path_reference

__all__ = ["gather_path", "gather_path_reference"]
