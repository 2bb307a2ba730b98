"""Logical axes of parameters to axes of a device mesh."""

from specjax.sharding._rules import (
    DEFAULT_RULES,
    Rules,
    logical_to_mesh,
    make_mesh,
    param_shardings,
)

__all__ = [
    "DEFAULT_RULES",
    "Rules",
    "logical_to_mesh",
    "make_mesh",
    "param_shardings",
]
