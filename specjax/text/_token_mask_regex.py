r"""Regular expressions as a small tree.

The tree comes from the parser of Python's own `re`, and a set of characters is
whatever `re` says it matches, so a pattern means here what it means in Python.
Libraries that compile patterns to tables have a meaning of their own: outlines-core
takes of ``a|ab`` only the branch that a search prefers, and ``\w{1,20}`` fills the
memory; for interegular ``\w`` is ASCII, and ``^`` an error.
"""

import functools
import re

# Underscored, but the only parser there is of Python's syntax.
import re._constants as ops  # pyright: ignore[reportMissingImports]
import re._parser as parser  # pyright: ignore[reportMissingImports]
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from specjax.text._tokenizer import check_text

# Code points from low to high, in order and apart from each other.
Ranges = tuple[tuple[int, int], ...]

# Surrogates are not characters and have no UTF-8.
_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF


@dataclass(frozen=True)
class Chars:
    """One character out of a set; of an empty set, nothing."""

    ranges: Ranges


@dataclass(frozen=True)
class Seq:
    """One part after the other; without parts, the empty text."""

    parts: tuple["Tree", ...]


@dataclass(frozen=True)
class Alt:
    """Any one of some parts; without parts, nothing at all."""

    parts: tuple["Tree", ...]


@dataclass(frozen=True)
class Repeat:
    """A part over and over: at least `low` times, at most `high`, None for ever."""

    part: "Tree"
    low: int
    high: int | None


Tree = Chars | Seq | Alt | Repeat

EMPTY = Seq(())
ANY_CHAR = Chars(((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST)))

_UNSUPPORTED = {
    ops.ASSERT: "a lookahead or lookbehind",
    ops.ASSERT_NOT: "a negative lookahead or lookbehind",
    ops.FAILURE: "a negative lookahead or lookbehind",
    ops.GROUPREF: "a back-reference",
    ops.GROUPREF_EXISTS: "a conditional group",
    ops.ATOMIC_GROUP: "an atomic group (?>...)",
    ops.POSSESSIVE_REPEAT: "a possessive quantifier such as a*+",
}
_REMEDY = {
    ops.POSSESSIVE_REPEAT: "use the plain quantifier",
    ops.ATOMIC_GROUP: "use a plain group (?:...)",
}
_STARTS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
_ENDS = (ops.AT_END, ops.AT_END_STRING)


def literal(text: str) -> Tree:
    """The tree of one text."""
    return Seq(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def optional(tree: Tree) -> Tree:
    """The tree of a text that may be left out."""
    return Repeat(tree, 0, 1)


def parse_pattern(pattern: str, where: str = "the pattern") -> Tree:
    """Reads a regular expression that is to match a text from end to end.

    Args:
      pattern: the expression, in Python's syntax.
      where: what it is, for messages.

    Returns:
      Its tree, without anchors and groups.

    Raises:
      TypeError: `pattern` is not a string.
      ValueError: it is broken or unsupported.
    """
    check_text(pattern, where)
    try:
        parsed = parser.parse(pattern)
    except re.error as error:
        raise ValueError(
            f"{where} {pattern!r} is not a regular expression: {error}: re.compile "
            "must accept it"
        ) from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(
            f"{where} {pattern[:60]!r} cannot be read ({error}): use smaller counts "
            "and fewer nested groups"
        ) from error
    return _Reader(pattern, where).sequence(parsed, parsed.state.flags, True, True)


class _Reader:
    """Turns what the parser of `re` gives into a tree."""

    def __init__(self, pattern: str, where: str):
        self._pattern = pattern
        self._where = where

    def sequence(self, items: Any, flags: int, at_start: bool, at_end: bool) -> Tree:
        items = list(items)
        anchors = [op is ops.AT for op, _ in items]
        parts = [
            self._item(
                op,
                arg,
                flags,
                at_start and all(anchors[:i]),
                at_end and all(anchors[i + 1 :]),
            )
            for i, (op, arg) in enumerate(items)
        ]
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _item(
        self, op: Any, arg: Any, flags: int, at_start: bool, at_end: bool
    ) -> Tree:
        if op is ops.AT:
            return self._anchor(arg, at_start, at_end)
        if op is ops.BRANCH:
            branches = (self.sequence(b, flags, at_start, at_end) for b in arg[1])
            return Alt(tuple(branches))
        if op is ops.SUBPATTERN:
            _, added, removed, items = arg
            if added & parser.TYPE_FLAGS:
                # One of ASCII and Unicode replaces the other.
                flags &= ~parser.TYPE_FLAGS
            return self.sequence(items, (flags | added) & ~removed, at_start, at_end)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            low, high, items = arg
            # Inside of (^a)* an anchor may be anywhere.
            once = (low, high) == (1, 1)
            part = self.sequence(items, flags, at_start and once, at_end and once)
            return Repeat(part, low, None if high == ops.MAXREPEAT else int(high))
        if op in _UNSUPPORTED:
            self._refuse(_UNSUPPORTED[op], _REMEDY.get(op, "spell out what may come"))
        return Chars(_chars(op, arg, flags))

    def _anchor(self, where: Any, at_start: bool, at_end: bool) -> Tree:
        if where in _STARTS and at_start or where in _ENDS and at_end:
            return EMPTY
        if where in (*_STARTS, *_ENDS):
            self._refuse(
                "an anchor (^, $, \\A or \\Z) inside the text",
                "leave it out, since the whole text is matched",
            )
        self._refuse("\\b or \\B", "spell out the character that comes there")

    def _refuse(self, construct: str, remedy: str) -> NoReturn:
        raise ValueError(
            f"{self._where} {self._pattern!r} holds {construct}, which a finite table "
            f"cannot follow: {remedy}"
        )


def _chars(op: Any, arg: Any, flags: int) -> Ranges:
    if op is ops.LITERAL and not flags & re.IGNORECASE:
        return ((arg, arg),)
    if op is ops.ANY:
        spelled = "."
    elif op is ops.IN:
        spelled = "[" + "".join(_spell(*item) for item in arg) + "]"
    else:
        negate = "^" if op is ops.NOT_LITERAL else ""
        spelled = f"[{negate}{_spell(ops.LITERAL, arg)}]"
    return _matched(spelled, flags & (re.IGNORECASE | re.ASCII | re.DOTALL))


def _spell(op: Any, arg: Any) -> str:
    """One item of a set of characters, in the syntax that it was parsed from."""
    if op is ops.NEGATE:
        return "^"
    if op is ops.LITERAL:
        return f"\\U{arg:08x}"
    if op is ops.RANGE:
        return f"\\U{arg[0]:08x}-\\U{arg[1]:08x}"
    letter = {"DIGIT": "d", "SPACE": "s", "WORD": "w"}
    kind, _, name = str(arg).removeprefix("CATEGORY_").rpartition("_")
    return "\\" + (letter[name].upper() if kind == "NOT" else letter[name])


@functools.lru_cache(maxsize=64)
def _matched(spelled: str, flags: int) -> Ranges:
    """The characters that a set matches, found by matching every character."""
    found = re.finditer(f"(?:{spelled})+", _universe(), flags)
    spans = (match.span() for match in found)
    return tuple(part for span in spans for part in _code_points(*span))


@functools.lru_cache(maxsize=1)
def _universe() -> str:
    return "".join(
        chr(point) for low, high in ANY_CHAR.ranges for point in range(low, high + 1)
    )


def _code_points(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The code points at some places of the universe, which leaves out surrogates."""
    first, gap = _SURROGATES[0], _SURROGATES[1] + 1 - _SURROGATES[0]
    if start < first:
        yield start, min(stop, first) - 1
    if stop > first:
        yield max(start, first) + gap, stop - 1 + gap


def without(ranges: Ranges, points: Sequence[int]) -> Ranges:
    """A set of characters less some.

    Args:
      ranges: the set.
      points: code points to leave out, in order.

    Returns:
      What is left.
    """
    left = []
    for low, high in ranges:
        for point in points:
            if low <= point <= high:
                if low < point:
                    left.append((low, point - 1))
                low = point + 1
        if low <= high:
            left.append((low, high))
    return tuple(left)
