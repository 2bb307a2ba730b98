"""The cost of a pass: gamma draft steps and one verification.

Times are in units of one plain decode step of the target (one row a sequence, at the
same batch and context), so a pass over gamma drafts costs gamma * c + v.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from specjax.theory._check import FloatArray, real, whole

#: One number for every width but 1, a table whose entry gamma is the cost of a pass
#: of gamma + 1 rows, or a function of the width.
VerifyCost = ArrayLike | Callable[[int], float]

COST = (
    "It is the time of one draft step over the time of one target decode step; 0 is "
    "a free drafter."
)
_V = "It is the time of a (gamma + 1)-row pass over a one-row pass; the papers' is 1."


def verify_cost_from_times(widths: ArrayLike, times_s: ArrayLike) -> FloatArray:
    """Makes a table of verify costs from measured pass times.

    Args:
      widths: rows a sequence in each measured pass, strictly growing, first 1; [N].
      times_s: seconds of each pass, > 0; [N].

    Returns:
      v by gamma, shape [widths[-1]]: entry gamma is the time of gamma + 1 rows over
      the one-row time, linear between measured widths. Entry 0 is 1.

    Raises:
      ValueError: the arrays do not fit, widths do not grow from 1, or a time is not
        positive.
    """
    remedy = "Measure passes of 1, 2, ... rows; a width is gamma + 1."
    rows = whole("widths", widths, least=1, remedy=remedy)
    times = real("times_s", times_s, least=0, open_least=True, remedy=remedy)
    if rows.ndim != 1 or rows.shape != times.shape or rows.size == 0:
        raise ValueError(
            f"widths={rows} and times_s={times} must be lists of one length. {remedy}"
        )
    if rows[0] != 1 or np.any(np.diff(rows) <= 0):
        raise ValueError(f"widths={rows} must grow from 1. {remedy}")
    return np.interp(np.arange(1, rows[-1] + 1), rows, times) / times[0]


def pass_cost(
    gamma: FloatArray, cost_ratio: ArrayLike, verify_cost: VerifyCost
) -> FloatArray:
    """Computes gamma c + v of checked gammas, in plain decode steps; 1 at 0."""
    c = real("cost_ratio", cost_ratio, least=0, remedy=COST)
    return gamma * c + _verify_costs(gamma, verify_cost)


def _verify_costs(gamma: FloatArray, verify_cost: VerifyCost) -> FloatArray:
    """Looks up v of each gamma; 1 at gamma 0, a one-row pass."""
    if callable(verify_cost):
        given = [verify_cost(int(g) + 1) if g else 1.0 for g in gamma.flat]
        costs = np.reshape(np.asarray(given, np.float64), gamma.shape)
        return real("verify_cost", costs, least=0, open_least=True, remedy=_V)
    table = real("verify_cost", verify_cost, least=0, open_least=True, remedy=_V)
    if table.ndim == 0:
        return np.where(gamma == 0, 1.0, table)
    if table.ndim > 1 or not table.size or not np.isclose(table[0], 1):
        raise ValueError(
            f"verify_cost={table} must be a list whose entry 0, the one-row pass, is "
            "1; divide the times by the one-row time."
        )
    if np.any(gamma >= table.size):
        raise ValueError(
            f"gamma={np.max(gamma):g} needs verify_cost of {np.max(gamma) + 1:g} rows, "
            f"but the table ends at gamma {table.size - 1}; measure wider passes or "
            "lower gamma."
        )
    return np.where(gamma == 0, 1.0, table[gamma.astype(np.int64)])
