"""Checks of arguments, with messages that name the value and the remedy."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

# Sums of measured shares may pass 1 by rounding.
_ROUNDING = 1e-9


def whole(name: str, value: Any, *, least: int, remedy: str) -> int:
    """Gives a whole number of at least ``least``.

    Raises:
      ValueError: it is no whole number, or below ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(
            f"{name}={value!r} must be a whole number >= {least}. {remedy}"
        )
    return number


def whole_tuple(name: str, values: Sequence[Any], *, least: int) -> tuple[int, ...]:
    """Gives a tuple of whole numbers of at least ``least``.

    Raises:
      ValueError: one is no whole number, or below ``least``, or it is no sequence.
    """
    try:
        listed = list(values)
    except TypeError:
        raise ValueError(
            f"{name}={values!r} must be a sequence of whole numbers."
        ) from None
    remedy = "Give plain integers."
    return tuple(
        whole(f"{name}[{i}]", value, least=least, remedy=remedy)
        for i, value in enumerate(listed)
    )


def chances(acceptance_by_rank: ArrayLike) -> FloatArray:
    """Gives the chances that a node's children are the accepted one, [K].

    Raises:
      ValueError: it is no list of probabilities of events of which one happens.
    """
    remedy = (
        "Entry r is the probability that, of a node's children in draft order, the one "
        "of rank r is accepted"
    )
    try:
        array = np.asarray(acceptance_by_rank, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"acceptance_by_rank={acceptance_by_rank!r} is no list of numbers. "
            f"{remedy}."
        ) from error
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"acceptance_by_rank has shape {array.shape} where [K] with K >= 1 is "
            f"needed. {remedy}."
        )
    good = (array >= 0) & (array <= 1)
    if not np.all(good):
        at = int(np.argmin(good))
        raise ValueError(
            f"acceptance_by_rank[{at}]={array[at]:g} must be in [0, 1]. {remedy}."
        )
    if array.sum() > 1 + _ROUNDING:
        raise ValueError(
            f"acceptance_by_rank={array} sums to {array.sum():g}, more than 1. "
            f"{remedy}; at most one is. Chances given that all earlier children were "
            "rejected must be multiplied by the chance of that first."
        )
    return array
