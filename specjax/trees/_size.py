"""How large a tree to verify, from measured times."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.trees._check import FloatArray, chances, whole, whole_tuple
from specjax.trees._sequoia import solve, unfold
from specjax.trees._topology import Topology


class BestSize(NamedTuple):
    """The tree that commits tokens fastest.

    Attributes:
      topology: the tree; empty where no tree pays, which is plain decoding.
      expected_tokens: tokens a pass, at least 1.
      pass_s: seconds of drafting and verifying it.
      time_per_token_s: ``pass_s / expected_tokens``.
    """

    topology: Topology
    expected_tokens: float
    pass_s: float
    time_per_token_s: float


def best_size(
    acceptance_by_rank: ArrayLike,
    t_target_s: Callable[[int], float] | ArrayLike,
    t_draft_s: float,
    *,
    sizes: Sequence[int] | None = None,
    max_depth: int | None = None,
) -> BestSize:
    """Finds the tree of least time per token on given hardware.

    Minimises (d t_draft + t_target(n)) / F(n, d) over sizes n and depths d. All are
    looked at: t_target is a staircase of tiles and compiled widths.

    Args:
      acceptance_by_rank: p, as for ``expected_tokens``. [K]
      t_target_s: seconds of a target pass over n draft nodes, n + 1 rows: an array
        with entry n for n nodes (entry 0 is plain decoding), or a function of n.
      t_draft_s: seconds of drafting one level, whatever its width; 0 for drafts that
        cost nothing.
      sizes: the n to look at, as they were measured; by default all entries of the
        array. With 0 among them the answer can be that no tree pays.
      max_depth: the deepest tree to look at, None for no limit.

    Returns:
      The best tree, the smaller and then the shallower of equals.

    Raises:
      ValueError: a time is not positive and finite, a size has none, or an argument
        is out of range.

    References:
      Chen et al., Sequoia, 2024, arXiv:2402.12374, hardware-aware tree optimizer.
    """
    accept = chances(acceptance_by_rank)
    times = _times(t_target_s, sizes)
    draft_s = _seconds("t_draft_s", t_draft_s, least=0)
    deepest = largest = max(times)
    if max_depth is not None:
        limit = whole("max_depth", max_depth, least=0, remedy="It counts levels.")
        deepest = min(limit, largest)
    levels = solve(accept, largest + 1, deepest)
    found = [
        ((depth * draft_s + target_s) / level.value[size + 1], size, depth)
        for size, target_s in times.items()
        for depth, level in enumerate(levels)
        # -inf where no such tree fits.
        if level.value[size + 1] > 0
    ]
    if not found:
        raise ValueError(
            f"no tree of sizes={sorted(times)} fits {accept.size} ranks and "
            f"{max_depth=}; add smaller sizes or raise max_depth."
        )
    best_s, size, depth = min(found)
    return BestSize(
        topology=unfold(levels, depth, size + 1),
        expected_tokens=float(levels[depth].value[size + 1]),
        pass_s=depth * draft_s + times[size],
        time_per_token_s=float(best_s),
    )


def _times(
    t_target_s: Callable[[int], float] | ArrayLike, sizes: Sequence[int] | None
) -> dict[int, float]:
    """Gives the seconds of each size, in growing order."""
    if callable(t_target_s):
        if sizes is None:
            raise ValueError(
                "t_target_s is a function, so sizes must say which numbers of nodes "
                "to look at."
            )
        read, n_measured = t_target_s, None
    else:
        read, n_measured = _table(t_target_s).item, np.size(t_target_s)
        sizes = range(n_measured) if sizes is None else sizes
    listed = sorted(set(whole_tuple("sizes", sizes, least=0)))
    if not listed:
        raise ValueError(f"{sizes=} is empty; name at least one number of nodes.")
    if n_measured is not None and listed[-1] >= n_measured:
        raise ValueError(
            f"sizes has {listed[-1]} but t_target_s ends at {n_measured - 1} nodes; "
            "measure it, or leave the size out."
        )
    return {
        size: _seconds(f"t_target_s of {size} nodes", read(size), least=None)
        for size in listed
    }


def _table(t_target_s: ArrayLike) -> FloatArray:
    array = np.asarray(t_target_s, np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"t_target_s has shape {array.shape}; give a list with entry n for n draft "
            "nodes, or a function of n."
        )
    return array


def _seconds(name: str, value: float, *, least: float | None) -> float:
    """Gives a time: positive, or at least ``least``."""
    number = float(value)
    # nan is neither.
    good = number > 0 if least is None else number >= least
    if not (good and np.isfinite(number)):
        bound = "> 0" if least is None else f">= {least:g}"
        raise ValueError(f"{name}={number:g} must be finite and {bound}, in seconds.")
    return number
