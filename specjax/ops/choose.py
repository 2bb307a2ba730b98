"""Which implementation of an operation is used."""

import os
from collections.abc import Callable
from typing import Literal, get_args

from specjax.ops.platform import current_platform

Implementation = Literal["xla", "pallas_tpu", "pallas_gpu"]

#: Environment variable: ``on`` lets kernels be chosen automatically. They are proved
#: in interpreters and compiled for the chips, and have not run on one yet.
VARIABLE = "SPECJAX_KERNELS"

_KERNELS: dict[str, Implementation] = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}


def kernels_allowed() -> bool:
    """Returns whether kernels may be chosen where none is named.

    Raises:
      ValueError: ``SPECJAX_KERNELS`` is neither ``on`` nor ``off``.
    """
    value = os.environ.get(VARIABLE, "off")
    if value not in ("on", "off"):
        raise ValueError(f"{VARIABLE}={value!r} is not known; use on or off.")
    return value == "on"


def choose(
    implementation: Implementation | None,
    unsupported: Callable[[Implementation], str | None],
) -> Implementation:
    """Chooses the implementation of an operation while it is traced.

    Args:
      implementation: the one that was named; None: the kernel of the platform that is
        compiled for, if it is allowed and can take the arrays, else ``xla``.
      unsupported: gives the reason why a kernel can't take them, or None.

    Returns:
      The implementation to use.

    Raises:
      ValueError: the one that was named is not known or can't take the arrays.
    """
    if implementation is None:
        kernel = _KERNELS.get(current_platform())
        if not kernels_allowed() or kernel is None or unsupported(kernel):
            return "xla"
        return kernel
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"{implementation=} is not known; use one of {get_args(Implementation)}."
        )
    if implementation != "xla" and (reason := unsupported(implementation)):
        raise ValueError(
            f"{implementation=} can't take this: {reason}. Use implementation='xla', "
            "or None to choose automatically."
        )
    return implementation
