"""Checks of generation settings that come from outside."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

_NUMBERS = {
    # name: (lowest, highest, whether the lowest and the highest are allowed)
    "temperature": (0.0, math.inf, True, False),
    "top_p": (0.0, 1.0, False, True),
    "min_p": (0.0, 1.0, True, False),
}
_INTEGERS = {
    # name: (lowest, highest or None)
    "top_k": (0, None),
    "seed": (0, 2**32 - 1),
    "max_new_tokens": (1, None),
}

SETTINGS = (*_NUMBERS, *_INTEGERS, "stop")


def check_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checks generation settings by type and range.

    Args:
      settings: any of ``temperature`` (finite, at least 0), ``top_p`` (above 0, at
        most 1), ``min_p`` (at least 0, below 1), ``top_k`` (at least 0, where 0 is
        off), ``seed`` (at least 0, below 2**32), ``max_new_tokens`` (at least 1)
        and ``stop`` (a list of non-empty strings).
      where: where the settings come from, for the message.

    Returns:
      The same settings with plain Python values: floats, ints and a tuple of
      strings.

    Raises:
      ValueError: a setting is unknown, or has a wrong type or value.
    """
    checked: dict[str, Any] = {}
    for name, value in settings.items():
        label = f"{where}: {name}"
        if name in _NUMBERS:
            checked[name] = _check_number(value, label, *_NUMBERS[name])
        elif name in _INTEGERS:
            checked[name] = _check_integer(value, label, *_INTEGERS[name])
        elif name == "stop":
            checked[name] = _check_stop(value, label)
        else:
            raise ValueError(
                f"{where}: unknown setting {name!r}; known are {sorted(SETTINGS)}"
            )
    return checked


def _check_number(
    value: Any, label: str, low: float, high: float, with_low: bool, with_high: bool
) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{label} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    above = number >= low if with_low else number > low
    below = number <= high if with_high else number < high
    # NaN fails both comparisons.
    if not (above and below):
        bounds = f"{'at least' if with_low else 'above'} {low:g}"
        if high == math.inf:
            bounds += " and finite"
        else:
            bounds += f" and {'at most' if with_high else 'below'} {high:g}"
        raise ValueError(f"{label} must be {bounds}, got {value!r}")
    return number


def _check_integer(value: Any, label: str, low: int, high: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{label} must be an integer, got {value!r}")
    number = int(value)
    if number < low or (high is not None and number > high):
        bounds = f"at least {low}" + ("" if high is None else f" and at most {high}")
        raise ValueError(f"{label} must be {bounds}, got {value!r}")
    return number


def _check_stop(value: Any, label: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ValueError(f"{label} must be a list of strings, got {value!r}")
    for string in value:
        if not isinstance(string, str) or not string:
            raise ValueError(f"{label} must hold non-empty strings, got {string!r}")
        if any("\ud800" <= char <= "\udfff" for char in string):
            raise ValueError(f"{label} holds a lone surrogate, got {string!r}")
    return tuple(value)
