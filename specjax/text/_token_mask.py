"""Which tokens may come next: a finite-state constraint over token ids."""

import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from specjax.text._token_mask_json import schema_tree
from specjax.text._token_mask_regex import parse_pattern
from specjax.text._token_mask_table import build_table
from specjax.text._tokenizer import Tokenizer

# States of one table: 200 MB at 49152 ids.
MAX_STATES = 1024


@dataclass(frozen=True, eq=False)
class TokenMask:
    """A finite-state constraint over token ids, as a dense table.

    A text begins in state `start`; the token ``t`` in state ``s`` is allowed where
    ``transitions[s, t]`` is not -1, and leads to that state. The table is all there
    is, so it can be put on a device and looked up there.

    Two masks are equal only where they are one object.

    Attributes:
      transitions: next state of each state and id, int32 ``[n_states, V]``; -1 where
        the id is not allowed. Read-only.
      start: the state before the first token.
      name: a short description, for messages.
    """

    transitions: np.ndarray
    start: int
    name: str = "token mask"

    def __post_init__(self):
        """Checks the table.

        Raises:
          TypeError: `transitions` is no int32 array, or `start` no integer.
          ValueError: a shape or a state is out of range, or a state that the start
            leads to allows no token.
        """
        table = self.transitions
        if not isinstance(table, np.ndarray) or table.dtype != np.int32:
            kind = getattr(table, "dtype", type(table).__name__)
            raise TypeError(
                f"{self.name}: transitions must be a NumPy array of int32, got {kind}: "
                "convert it with np.asarray(transitions, np.int32)"
            )
        if table.ndim != 2 or 0 in table.shape:
            raise ValueError(
                f"{self.name}: transitions must be [n_states, vocab_size], got shape "
                f"{table.shape}"
            )
        low, high = int(table.min()), int(table.max())
        if low < -1 or high >= len(table):
            raise ValueError(
                f"{self.name}: transitions hold {low if low < -1 else high}, but the "
                f"states are 0 to {len(table) - 1}, and -1 is a token that is not "
                "allowed: renumber the states"
            )
        object.__setattr__(self, "start", operator.index(self.start))
        if not 0 <= self.start < len(table):
            raise ValueError(
                f"{self.name}: start is {self.start}, but the states are 0 to "
                f"{len(table) - 1}"
            )
        self._check_dead_ends()
        view = table.view()
        view.flags.writeable = False
        object.__setattr__(self, "transitions", view)

    @classmethod
    def from_regex(
        cls,
        pattern: str,
        tokenizer: Tokenizer,
        eos_ids: Iterable[int],
        *,
        vocab_size: int | None = None,
        max_states: int = MAX_STATES,
    ) -> Self:
        r"""The texts that a regular expression matches from end to end.

        The generated text, without the prompt and as `Tokenizer.decode` gives it,
        matches `pattern` as ``re.fullmatch`` does. Where it does, and only there,
        the end ids are allowed; after one of them nothing else is. A token is
        allowed where some continuation in tokens leads to a match.

        All of Python's syntax is understood but what looks around: lookahead,
        lookbehind, back-references, conditional and atomic groups, possessive
        quantifiers, ``\b`` and ``\B``, and anchors inside the pattern. Anchors at
        its ends change nothing.

        Args:
          pattern: the regular expression.
          tokenizer: what the ids stand for. Special tokens are never allowed, the
            end ids apart.
          eos_ids: the ids that end a text. They may be empty where the texts can go
            on for ever.
          vocab_size: ids of the model where they are more than the tokenizer's; the
            others are never allowed.
          max_states: largest table. One takes ``4 * n_states * vocab_size`` bytes.

        Returns:
          The mask.

        Raises:
          TypeError: an argument has a wrong type.
          ValueError: the pattern is broken, unsupported, matches nothing or nothing
            that tokens can spell; an id is out of range; there is no end id where a
            text must end; or the table would be too large.
        """
        tree = parse_pattern(pattern)
        what = _short("regex", pattern)
        table = build_table(tree, tokenizer, eos_ids, vocab_size, max_states, what)
        return cls(table, 0, what)

    @classmethod
    def from_json_schema(
        cls,
        schema: Mapping[str, Any] | str,
        tokenizer: Tokenizer,
        eos_ids: Iterable[int],
        *,
        vocab_size: int | None = None,
        max_states: int = MAX_STATES,
    ) -> Self:
        """The JSON texts that a schema describes, in one way of writing each.

        Every text is valid under the schema, but not every valid text is allowed.
        Properties come in the schema's order and no others are added; one space may
        follow a comma, a colon or an opening bracket and come before a closing one;
        strings escape only what must be and hold no control characters but those
        with a short escape; integers have no fraction.

        Supported are ``type`` (one or several), ``enum``, ``const``, ``anyOf``,
        ``allOf`` with one schema, and ``$ref`` inside the schema without recursion;
        of strings ``minLength``, ``maxLength`` and ``pattern``, which is in Python's
        syntax and must match the whole string; of integers ``minimum``, ``maximum``
        and their exclusive forms; of arrays ``items``, ``prefixItems``, ``minItems``
        and ``maxItems``; of objects ``properties``, ``required`` and
        ``additionalProperties``. Annotations such as ``title`` are passed over.
        Anything else is refused, not ignored.

        Args:
          schema: the schema, as a mapping or as JSON text.
          tokenizer: as in `from_regex`.
          eos_ids: as in `from_regex`.
          vocab_size: as in `from_regex`.
          max_states: as in `from_regex`. A string of bounded length takes about ten
            states for each character.

        Returns:
          The mask.

        Raises:
          TypeError: an argument has a wrong type.
          ValueError: the schema is not JSON, is malformed, or holds a keyword that is
            not supported; or as in `from_regex`.
        """
        tree = schema_tree(schema)
        text = schema if isinstance(schema, str) else json.dumps(schema, default=str)
        what = _short("JSON schema", text)
        table = build_table(tree, tokenizer, eos_ids, vocab_size, max_states, what)
        return cls(table, 0, what)

    @classmethod
    def from_allowed(cls, ids: Iterable[int], vocab_size: int) -> Self:
        """The same ids at every position.

        Args:
          ids: the ids that are allowed; an end id must be among them for a text to
            end.
          vocab_size: number of ids of the model.

        Returns:
          The mask, of one state.

        Raises:
          TypeError: an id is not an integer.
          ValueError: there is no id, or one is out of range.
        """
        table = np.full((1, vocab_size), -1, np.int32)
        allowed = [operator.index(ident) for ident in ids]
        if not allowed:
            raise ValueError("from_allowed got no ids: at least one must be allowed")
        for ident in allowed:
            if not 0 <= ident < vocab_size:
                raise ValueError(
                    f"from_allowed got the id {ident}, but the ids are 0 to "
                    f"{vocab_size - 1}"
                )
        table[0, allowed] = 0
        return cls(table, 0, f"{len(set(allowed))} allowed ids")

    @property
    def n_states(self) -> int:
        """Number of states."""
        return self.transitions.shape[0]

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.transitions.shape[1]

    def advance(self, ids: Iterable[int], state: int | None = None) -> int:
        """The state after some tokens.

        Args:
          ids: the tokens, in order.
          state: the state before them; the start where None.

        Returns:
          The state.

        Raises:
          TypeError: an id is not an integer.
          ValueError: a token is not allowed where it stands, or `state` is out of
            range.
        """
        now = self._check_state(self.start if state is None else state)
        for position, ident in enumerate(ids):
            after = self._after(now, ident)
            if after < 0:
                raise ValueError(
                    f"{self.name}: the id {ident} at position {position} is not "
                    f"allowed in state {now}: allowed({now}) says which of the "
                    f"{self.vocab_size} ids are"
                )
            now = after
        return now

    def allows(self, ids: Iterable[int]) -> bool:
        """Whether some tokens are allowed one after the other, from the start on.

        Args:
          ids: the tokens, in order; the text need not be complete with them.

        Returns:
          False also for ids out of range.
        """
        now = self.start
        for ident in ids:
            now = self._after(now, ident)
            if now < 0:
                return False
        return True

    def allowed(self, state: int) -> np.ndarray:
        """Which ids are allowed in a state.

        Args:
          state: the state.

        Returns:
          bool ``[vocab_size]``.

        Raises:
          ValueError: `state` is out of range.
        """
        return self.transitions[self._check_state(state)] >= 0

    def __repr__(self) -> str:
        return (
            f"TokenMask({self.name!r}, n_states={self.n_states}, "
            f"vocab_size={self.vocab_size})"
        )

    def _after(self, state: int, ident: int) -> int:
        token = operator.index(ident)
        # A negative index would count from the end.
        inside = 0 <= token < self.vocab_size
        return int(self.transitions[state, token]) if inside else -1

    def _check_state(self, state: int) -> int:
        value = operator.index(state)
        if not 0 <= value < self.n_states:
            raise ValueError(
                f"{self.name}: the state {value} is out of range; the states are 0 to "
                f"{self.n_states - 1}"
            )
        return value

    def _check_dead_ends(self) -> None:
        seen = np.zeros(len(self.transitions), bool)
        seen[self.start] = True
        waiting = [self.start]
        while waiting:
            state = waiting.pop()
            row = self.transitions[state]
            after = np.zeros_like(seen)
            after[row[row >= 0]] = True
            if not after.any():
                raise ValueError(
                    f"{self.name}: state {state} can be reached and allows no token, "
                    "so a text that comes there cannot go on: allow an end id in it, "
                    "or set the tokens that lead to it to -1"
                )
            waiting += np.flatnonzero(after & ~seen).tolist()
            seen |= after


def _short(kind: str, text: object) -> str:
    shown = str(text)
    return f"{kind} {shown if len(shown) <= 60 else shown[:57] + '...'}"
