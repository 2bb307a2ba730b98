"""A tree as a deterministic automaton over the bytes of UTF-8."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from specjax.text._token_mask_regex import Alt, Chars, Ranges, Repeat, Seq, Tree

# Parts of a tree once its counts are spelled out.
_MAX_PLACES = 100_000

# The code points of each length of UTF-8, and the mark of its first byte.
_LENGTHS = (
    (0, 0x7F, 0),
    (0x80, 0x7FF, 0xC0),
    (0x800, 0xFFFF, 0xE0),
    (0x10000, 0x10FFFF, 0xF0),
)

# The place after the end of the text, and the node after the end of a character.
_ACCEPT = 0
_DONE = 0


class ByteAutomaton(NamedTuple):
    """A deterministic automaton over bytes that starts in state 0.

    Attributes:
      step: next state of each state and byte, int32 ``[n, 256]``; -1 for none.
      accepting: whether a text may end in a state, bool ``[n]``.
    """

    step: np.ndarray
    accepting: np.ndarray


def byte_automaton(tree: Tree, max_states: int, what: str) -> ByteAutomaton:
    """Compiles a tree.

    Args:
      tree: the tree.
      max_states: largest automaton.
      what: what the tree is, for messages.

    Returns:
      The automaton. From every state of it a text can be completed.

    Raises:
      ValueError: it is too large, or matches no text at all.
    """
    threads = _Threads(what)
    try:
        start = threads.closure(threads.add(tree, _ACCEPT))
    except RecursionError as error:
        raise ValueError(f"{what} is nested too deeply: flatten it") from error
    numbers = {start: 0}
    waiting = [start]
    edges: list[dict[int, int]] = []
    for state in waiting:
        edges.append({})
        for byte, after in threads.step(state).items():
            if after not in numbers:
                if len(numbers) == max_states:
                    raise ValueError(
                        f"{what} needs more than {max_states} states over bytes, where "
                        "it was given up: lower its counts ({m,n}, maxLength, "
                        "maxItems), or raise max_states"
                    )
                numbers[after] = len(waiting)
                waiting.append(after)
            edges[-1][byte] = numbers[after]
    step = np.full((len(waiting), 256), -1, np.int32)
    for state, row in enumerate(edges):
        step[state, list(row)] = list(row.values())
    accepting = np.array([(_ACCEPT, _DONE) in state for state in waiting])
    return _trimmed(step, accepting, what)


def _trimmed(step: np.ndarray, accepting: np.ndarray, what: str) -> ByteAutomaton:
    """Leaves out the states from which no text can be completed."""
    alive = reaching([np.unique(row[row >= 0]) for row in step], accepting)
    if not alive[0]:
        raise ValueError(f"{what} matches no text at all: loosen it")
    numbers = np.append(np.where(alive, np.cumsum(alive) - 1, -1), -1)
    return ByteAutomaton(numbers[step[alive]].astype(np.int32), accepting[alive])


def reaching(after: Iterable[np.ndarray], goals: np.ndarray) -> np.ndarray:
    """The states that lead to a goal.

    Args:
      after: the states that each state leads to.
      goals: whether a state is a goal itself.

    Returns:
      bool, of the form of `goals`.
    """
    before: list[list[int]] = [[] for _ in goals]
    for state, ends in enumerate(after):
        for end in ends:
            before[end].append(state)
    found = goals.copy()
    waiting = np.flatnonzero(goals).tolist()
    while waiting:
        for state in before[waiting.pop()]:
            if not found[state]:
                found[state] = True
                waiting.append(state)
    return found


class _Characters:
    """Sets of characters as trees of bytes, in which equal parts are one node.

    A node is the (byte, next node) pairs of the bytes that may come.
    """

    def __init__(self):
        self.nodes: list[tuple[tuple[int, int], ...]] = [()]
        self._numbers: dict[tuple[tuple[int, int], ...], int] = {}
        self._roots: dict[Ranges, int] = {}
        self._tails: dict[tuple[Ranges, int], int] = {}

    def root(self, ranges: Ranges) -> int:
        """The node in front of a character of a set."""
        if ranges not in self._roots:
            edges = []
            for n_more, (low, high, mark) in enumerate(_LENGTHS):
                part = _within(ranges, low, high)
                edges += [(mark | i, node) for i, node in self._blocks(part, n_more)]
            self._roots[ranges] = self._node(edges)
        return self._roots[ranges]

    def _blocks(self, ranges: Ranges, n_more: int) -> Iterator[tuple[int, int]]:
        """The node of each block of code points with equal bits but the last."""
        if not ranges:
            return
        bits = 6 * n_more
        for i in range(ranges[0][0] >> bits, (ranges[-1][1] >> bits) + 1):
            part = _within(ranges, i << bits, ((i + 1) << bits) - 1)
            if part and not n_more:
                yield i, _DONE
            elif part:
                # Without the block's own bits all full blocks are alike.
                base = i << bits
                rest = tuple((low - base, high - base) for low, high in part)
                yield i, self._tail(rest, n_more)

    def _tail(self, ranges: Ranges, n_more: int) -> int:
        """The node in front of the last bytes of a character, `n_more` of them."""
        key = (ranges, n_more)
        if key not in self._tails:
            blocks = self._blocks(ranges, n_more - 1)
            self._tails[key] = self._node([(0x80 | i, node) for i, node in blocks])
        return self._tails[key]

    def _node(self, edges: list[tuple[int, int]]) -> int:
        key = tuple(edges)
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(key)
        return self._numbers[key]


def _within(ranges: Ranges, low: int, high: int) -> Ranges:
    return tuple(
        (max(a, low), min(b, high)) for a, b in ranges if a <= high and b >= low
    )


class _Threads:
    """The places in a tree that a text can have come to, as Thompson has them.

    A place reads a character and goes on to another place, or forks into places.
    A state of the automaton is a set of (place, node within its character).
    """

    def __init__(self, what: str):
        self._what = what
        self._characters = _Characters()
        self._roots: list[int] = [_DONE]
        self._after: list[int] = [_ACCEPT]
        self._forks: dict[int, list[int]] = {}
        self._closures: dict[int, frozenset] = {}
        self._added: dict[tuple[Ranges | int, int], int] = {}

    def add(self, tree: Tree, after: int) -> int:
        """Adds a tree that goes on to a place; returns the place it begins at.

        The same tree in front of the same place is added once: that keeps the
        alternatives of which many end alike from multiplying the states.
        """
        key = (tree.ranges if isinstance(tree, Chars) else id(tree), after)
        if key not in self._added:
            self._added[key] = self._add(tree, after)
        return self._added[key]

    def _add(self, tree: Tree, after: int) -> int:
        if isinstance(tree, Chars):
            return self._place(self._characters.root(tree.ranges), after)
        if isinstance(tree, Seq):
            for part in reversed(tree.parts):
                after = self.add(part, after)
            return after
        if isinstance(tree, Alt):
            return self._fork([self.add(part, after) for part in tree.parts])
        assert isinstance(tree, Repeat)
        end = after
        if tree.high is None:
            after = self._fork([end])
            self._forks[after].append(self.add(tree.part, after))
        for _ in range(tree.low, tree.high or 0):
            after = self._fork([self.add(tree.part, after), end])
        for _ in range(tree.low):
            before = self.add(tree.part, after)
            if before == after:
                # The empty text, however often.
                break
            after = before
        return after

    def closure(self, place: int) -> frozenset:
        """The places that read a character, from a place on without reading."""
        if place not in self._closures:
            seen, waiting = {place}, [place]
            while waiting:
                fresh = set(self._forks.get(waiting.pop(), ())) - seen
                seen |= fresh
                waiting += fresh
            self._closures[place] = frozenset(
                (one, self._roots[one]) for one in seen if one not in self._forks
            )
        return self._closures[place]

    def step(self, state: frozenset) -> dict[int, frozenset]:
        """Where each byte leads from a state."""
        by_byte: dict[int, list] = {}
        for place, node in state:
            for byte, child in self._characters.nodes[node]:
                by_byte.setdefault(byte, []).append((place, child))
        # Most bytes do as others do.
        made: dict[tuple, frozenset] = {}
        result = {}
        for byte, items in by_byte.items():
            key = tuple(items)
            if key not in made:
                after = (
                    self.closure(self._after[place])
                    if child == _DONE
                    else frozenset([(place, child)])
                    for place, child in items
                )
                made[key] = frozenset().union(*after)
            result[byte] = made[key]
        return result

    def _place(self, root: int, after: int) -> int:
        if len(self._roots) > _MAX_PLACES:
            raise ValueError(
                f"{self._what} has more than {_MAX_PLACES} parts once its counts are "
                "spelled out: lower them ({m,n}, maxLength, maxItems)"
            )
        self._roots.append(root)
        self._after.append(after)
        return len(self._roots) - 1

    def _fork(self, places: list[int]) -> int:
        fork = self._place(_DONE, _ACCEPT)
        self._forks[fork] = places
        return fork
