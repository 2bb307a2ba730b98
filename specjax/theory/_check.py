"""Checks of arguments, with messages that name the value and the remedy."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
#: A float for scalar arguments, a float64 array of the broadcast shape otherwise; the
#: type checker cannot tell which, as with NumPy's own functions.
Values = Any


def real(
    name: str,
    value: ArrayLike,
    *,
    least: float = -np.inf,
    most: float = np.inf,
    open_least: bool = False,
    remedy: str,
) -> FloatArray:
    """Gives finite float64 numbers of a range.

    Args:
      name: the argument's name, for the message.
      value: numbers of any shape.
      least: the least allowed value.
      most: the greatest allowed value.
      open_least: whether ``least`` itself is forbidden.
      remedy: what to do instead, a sentence.

    Returns:
      The numbers as float64, of the same shape.

    Raises:
      ValueError: a number is nan, infinite or outside the range, or is not a number.
    """
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r} is not a number. {remedy}") from error
    good = np.isfinite(array) & (array <= most)
    good &= (array > least) if open_least else (array >= least)
    if not np.all(good):
        _refuse(name, array, good, f"{_range(least, most, open_least)}. {remedy}")
    return array


def whole(name: str, value: ArrayLike, *, least: int = 0, remedy: str) -> FloatArray:
    """Gives whole numbers of at least ``least``, as float64.

    Raises:
      ValueError: a number is nan, infinite, fractional or below ``least``.
    """
    array = real(name, value, least=least, remedy=remedy)
    good = array == np.floor(array)
    if not np.all(good):
        _refuse(name, array, good, f"a whole number. {remedy}")
    return array


def one(name: str, array: FloatArray) -> float:
    """Gives the number of a 0-dimensional array.

    Raises:
      ValueError: the array has dimensions.
    """
    if array.ndim:
        raise ValueError(
            f"{name} has shape {array.shape} where one number is needed; "
            "call the function once for each."
        )
    return float(array)


def plain(array: FloatArray) -> Values:
    """Gives a float for a 0-dimensional array, the array itself otherwise."""
    return float(array) if np.ndim(array) == 0 else array


def _range(least: float, most: float, open_least: bool) -> str:
    if np.isinf(least) and np.isinf(most):
        return "a finite number"
    if np.isinf(most):
        return f"a finite number {'>' if open_least else '>='} {least:g}"
    return f"in {'(' if open_least else '['}{least:g}, {most:g}]"


def _refuse(name: str, array: FloatArray, good: NDArray, rest: str) -> None:
    """Raises for the first number that is not good."""
    at = np.unravel_index(int(np.argmin(good)), array.shape)
    place = f"[{', '.join(str(int(i)) for i in at)}]" if array.ndim else ""
    raise ValueError(f"{name}{place}={array[at]:g} must be {rest}")
