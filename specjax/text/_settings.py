"""Checks of generation settings that come from outside."""

import json
import math
import numbers
import re
from collections.abc import Callable, Mapping
from typing import Any

# What the device's integers hold.
_MOST = 2**31 - 1

_NUMBERS = {
    # name: (lowest, highest, whether the lowest and the highest are allowed)
    "temperature": (0.0, math.inf, True, False),
    "top_p": (0.0, 1.0, False, True),
    "min_p": (0.0, 1.0, True, False),
    "repetition_penalty": (0.0, math.inf, False, False),
    "presence_penalty": (-math.inf, math.inf, False, False),
    "frequency_penalty": (-math.inf, math.inf, False, False),
}
_INTEGERS = {
    # name: (lowest, highest or None)
    "top_k": (0, None),
    "seed": (0, 2**32 - 1),
    "max_new_tokens": (1, None),
    "min_new_tokens": (0, _MOST),
}


def check_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checks generation settings by type and range.

    Args:
      settings: any of ``temperature`` (finite, at least 0), ``top_p`` (above 0, at
        most 1), ``min_p`` (at least 0, below 1), ``top_k`` (at least 0, where 0 is
        off), ``seed`` (at least 0, below 2**32), ``max_new_tokens`` (at least 1),
        ``min_new_tokens`` (at least 0), ``max_drafts`` (at least 0, where None is what
        the drafter likes) and ``stop`` (a list of non-empty strings);
        ``repetition_penalty`` (finite, above 0), ``presence_penalty`` and
        ``frequency_penalty`` (finite); ``logit_bias`` (id -> finite number),
        ``banned_ids`` (a list of ids) and ``forced_ids`` (output position -> id),
        where keys may be whole numbers or, as in JSON, their decimal digits; and
        one of ``regex`` (a non-empty string) and ``json_schema`` (an object), where
        None is no constraint.
      where: where the settings come from, for the message.

    Returns:
      The same settings with plain Python values: floats, ints, strings, tuples of
      these, and dicts.

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
        elif name in _OTHERS:
            checked[name] = _OTHERS[name](value, label)
        else:
            raise ValueError(
                f"{where}: unknown setting {name!r}; known are {sorted(SETTINGS)}"
            )
    if None not in (checked.get("regex"), checked.get("json_schema")):
        raise ValueError(
            f"{where}: regex and json_schema exclude one another: keep one of them"
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
        if low == -math.inf:
            bounds = "finite"
        elif high == math.inf:
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


def _check_max_drafts(value: Any, label: str) -> int | None:
    return None if value is None else _check_integer(value, label, 0, _MOST)


def _check_stop(value: Any, label: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ValueError(f"{label} must be a list of strings, got {value!r}")
    for string in value:
        if not isinstance(string, str) or not string:
            raise ValueError(f"{label} must hold non-empty strings, got {string!r}")
        _check_surrogates(string, label)
    return tuple(value)


def _check_surrogates(string: str, label: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in string):
        raise ValueError(f"{label} holds a lone surrogate, got {string!r}")


def _check_ids(value: Any, label: str) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ValueError(f"{label} must be a list of ids, got {value!r}")
    return tuple(_check_integer(ident, label, 0, _MOST) for ident in value)


def _check_bias(value: Any, label: str) -> dict[int, float]:
    bias = {}
    for ident, number in _check_keys(value, label, "id", "a number"):
        at = f"{label}[{ident}]"
        if number is None or number == -math.inf:
            raise ValueError(f"{at} is {number}: to ban an id, put it into banned_ids")
        bias[ident] = _check_number(number, at, -math.inf, math.inf, False, False)
    return bias


def _check_forced(value: Any, label: str) -> dict[int, int]:
    pairs = _check_keys(value, label, "output position", "an id")
    return {at: _check_integer(i, f"{label}[{at}]", 0, _MOST) for at, i in pairs}


def _check_keys(value: Any, label: str, key: str, what: str) -> list[tuple[int, Any]]:
    """Returns a mapping's pairs, the keys as whole numbers."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{label} must be an object, {key} -> {what}, got {value!r}")
    pairs = []
    for name, item in value.items():
        # One spelling only, so that no key is there twice.
        if not re.fullmatch("0|[1-9][0-9]{0,9}", str(name)):
            raise ValueError(f"{label} must have an {key} as each key, got {name!r}")
        number = int(str(name))
        pairs.append((_check_integer(number, f"{label} key", 0, _MOST), item))
    return pairs


def _check_regex(value: Any, label: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ValueError(f"{label} must be a non-empty string, got {value!r}")
    _check_surrogates(value, label)
    return value


def _check_schema(value: Any, label: str) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{label} must be an object, got {value!r:.60}")
    try:
        # A copy, in the order of its keys, which is that of the properties.
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{label} is not JSON: {error}") from error


_OTHERS: Mapping[str, Callable[[Any, str], Any]] = {
    "max_drafts": _check_max_drafts,
    "stop": _check_stop,
    "logit_bias": _check_bias,
    "banned_ids": _check_ids,
    "forced_ids": _check_forced,
    "regex": _check_regex,
    "json_schema": _check_schema,
}

SETTINGS = (*_NUMBERS, *_INTEGERS, *_OTHERS)
