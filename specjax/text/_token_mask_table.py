"""A tree as a table over token ids."""

import operator
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from specjax.text._token_mask_bytes import ByteAutomaton, byte_automaton, reaching
from specjax.text._token_mask_regex import Tree
from specjax.text._token_mask_spelling import Spellings, spellings
from specjax.text._tokenizer import Tokenizer

# Tokens need not end at every state over bytes, so there may be this many times as
# many of those as of states over tokens, and always some thousands.
_BYTE_STATES = 16
_MIN_BYTE_STATES = 8192

# States whose rows are looked up together, which bounds the temporary arrays.
_CHUNK = 32


def build_table(
    tree: Tree,
    tokenizer: Tokenizer,
    eos_ids: Iterable[int],
    vocab_size: int | None,
    max_states: int,
    what: str,
) -> np.ndarray:
    """Compiles a tree to the table of a `TokenMask` that starts in state 0.

    Args:
      tree: the texts.
      tokenizer: what the ids stand for.
      eos_ids: the ids that end a text.
      vocab_size: number of ids, the tokenizer's where None.
      max_states: largest number of states.
      what: what the tree is, for messages.

    Returns:
      int32 ``[n_states, vocab_size]``. With end ids, the last state is the one after
      an end id.

    Raises:
      TypeError: an argument has a wrong type.
      ValueError: an id or a size is out of range; no token sequence spells a text; a
        text must end and there is no end id; or the table would be too large.
    """
    size = _check_size(tokenizer, vocab_size)
    ends = _check_ends(eos_ids, size)
    if operator.index(max_states) < 1:
        raise ValueError(f"{max_states=} must be at least 1")
    most = max(_BYTE_STATES * max_states, _MIN_BYTE_STATES)
    automaton = byte_automaton(tree, most, what)
    rows = _Rows(automaton, *spellings(tokenizer, set(ends)), size)
    states, after = rows.explore()
    alive = reaching(after, rows.accepting[states])
    if not alive[0]:
        raise ValueError(
            f"{what}: no sequence of the tokenizer's tokens spells a text that it "
            f"matches; {tokenizer!r} lacks a character of every such text: loosen it"
        )
    if not ends:
        _check_endless(after, alive, what)
    n_states = int(alive.sum()) + bool(ends)
    if n_states > max_states:
        raise ValueError(
            f"{what} needs a table of {n_states} states "
            f"({4e-6 * n_states * size:.0f} MB), more than {max_states=}: lower its "
            "counts ({m,n}, maxLength, maxItems), or raise max_states"
        )
    return _assemble(rows, states[alive], ends, n_states)


class _Level(NamedTuple):
    """The prefixes of one length of all tokens.

    Attributes:
      parents: each prefix without its last byte, as an index into the level before.
      last: the last byte of each prefix.
      ids: the tokens that end here.
      ends: the prefix that each of them is.
    """

    parents: np.ndarray
    last: np.ndarray
    ids: np.ndarray
    ends: np.ndarray


def _levels(texts: Spellings) -> list[_Level]:
    """All prefixes of tokens by their length, each of them once."""
    ids = [i for i, text in enumerate(texts) if text]
    # Longest first, so that those with a byte at some place are the first ones.
    ids.sort(key=lambda i: -len(texts[i] or b""))
    lengths = np.array([len(texts[i] or b"") for i in ids], int)
    width = int(lengths[0]) if ids else 0
    padded = b"".join((texts[i] or b"").ljust(width, b"\0") for i in ids)
    table = np.frombuffer(padded, np.uint8).reshape(len(ids), width)
    order = np.array(ids, int)
    node = np.zeros(len(ids), int)
    levels = []
    for place in range(width):
        n = int((lengths > place).sum())
        n_longer = int((lengths > place + 1).sum())
        keys = node[:n] * 256 + table[:n, place]
        prefixes, node = np.unique(keys, return_inverse=True)
        levels.append(
            _Level(prefixes >> 8, prefixes & 255, order[n_longer:n], node[n_longer:n])
        )
    return levels


class _Rows:
    """Where every token leads, from the states of an automaton over bytes.

    The first token of a text may spell something else than it does later. State
    `n`, beyond those of the automaton, is then its start before the first token.
    """

    def __init__(
        self, automaton: ByteAutomaton, later: Spellings, first: Spellings, size: int
    ):
        n = len(automaton.step)
        # One more row for the start and one for no state, which leads to itself.
        self._none = n + 1
        step = np.full((n + 2, 256), -1, np.int32)
        step[:n], step[n] = automaton.step, automaton.step[0]
        step[step < 0] = self._none
        self._step = step.ravel()
        self.accepting = np.append(automaton.accepting, automaton.accepting[0])
        self._later, self._size = _levels(later), size
        self._first = None if first == later else _levels(first)
        self._silent = [i for i, text in enumerate(first) if text == b""]

    def explore(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """The states that tokens lead to, the start first, and those after each.

        Returns:
          The states, and for each of them, as indices into the first result, the
          states that follow it.
        """
        states = [0 if self._first is None else len(self.accepting) - 1]
        place = np.full(len(self.accepting), -1)
        place[states] = 0
        after: list[np.ndarray] = []
        while len(after) < len(states):
            rows = self.of(states[len(after) : len(after) + _CHUNK])
            for row in rows:
                found = np.zeros(len(place), bool)
                found[row[row >= 0]] = True
                fresh = np.flatnonzero(found & (place < 0))
                place[fresh] = len(states) + np.arange(len(fresh))
                states += fresh.tolist()
                after.append(place[found])
        return np.array(states), after

    def of(self, states: Iterable[int]) -> np.ndarray:
        """The rows of some states.

        Args:
          states: no more than `_CHUNK` of them.

        Returns:
          int32 ``[states, vocab_size]``, the state after each token; -1 for none.
        """
        states = np.asarray(list(states), np.int32)
        if self._first is not None and states[0] == len(self.accepting) - 1:
            start = self._walk(self._first, states[:1])
            start[:, self._silent] = 0
            return np.concatenate([start, self._walk(self._later, states[1:])])
        return self._walk(self._later, states)

    def _walk(self, levels: list[_Level], states: np.ndarray) -> np.ndarray:
        rows = np.full((len(states), self._size), -1, np.int32)
        now = states[:, None]
        for level in levels:
            now = self._step[now[:, level.parents] * 256 + level.last]
            rows[:, level.ids] = now[:, level.ends]
        rows[rows == self._none] = -1
        return rows


def _assemble(
    rows: _Rows, states: np.ndarray, ends: list[int], n_states: int
) -> np.ndarray:
    """The table over some states, renumbered in their order."""
    # One more number for -1, which stays.
    numbers = np.full(len(rows.accepting) + 1, -1, np.int32)
    numbers[states] = np.arange(len(states))
    chunks = [
        numbers[rows.of(states[i : i + _CHUNK])] for i in range(0, len(states), _CHUNK)
    ]
    if ends:
        chunks.append(np.full((1, chunks[0].shape[1]), -1, np.int32))
    table = np.concatenate(chunks)
    if ends:
        final = [*np.flatnonzero(rows.accepting[states]), n_states - 1]
        table[np.ix_(final, ends)] = n_states - 1
    return table


def _check_size(tokenizer: Tokenizer, vocab_size: int | None) -> int:
    size = tokenizer.vocab_size if vocab_size is None else operator.index(vocab_size)
    if size < tokenizer.vocab_size:
        raise ValueError(
            f"vocab_size is {size}, but the tokenizer has {tokenizer.vocab_size} ids: "
            "give the size of the model's vocabulary, padding included"
        )
    return size


def _check_ends(eos_ids: Iterable[int], size: int) -> list[int]:
    ends = sorted({operator.index(ident) for ident in eos_ids})
    for ident in ends:
        if not 0 <= ident < size:
            raise ValueError(
                f"eos_ids holds {ident}, but the ids are 0 to {size - 1}: give the end "
                "ids of the model (tokenizer.eos_ids)"
            )
    return ends


def _check_endless(after: list[np.ndarray], alive: np.ndarray, what: str) -> None:
    """Checks that no text comes to where only an end id could follow."""
    for i, following in enumerate(after):
        if alive[i] and not alive[following].any():
            raise ValueError(
                f"{what}: eos_ids is empty, but a text that it matches comes to an end "
                "where nothing else may follow: give the ids that end a text "
                "(tokenizer.eos_ids)"
            )
