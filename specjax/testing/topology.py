"""Shapes of a proposal: which draft token follows which.

A topology is a tuple of parents: ``parents[i]`` is the draft position that position i
follows, -1 where it follows the context itself; parents come before their children. A
chain of three is (-1, 0, 1), a root with two children (-1, -1). The target scores a
proposal in one row more than it has positions: row 0 is the context, row i + 1 is draft
position i.
"""

import numpy as np

from specjax.testing.tables import Drafts, TableModel

Parents = tuple[int, ...]


def chain(gamma: int) -> Parents:
    """Returns the topology of gamma tokens, each following the one before."""
    return tuple(range(-1, gamma - 1))


def check_parents(parents: Parents) -> None:
    """Checks a topology.

    Raises:
      ValueError: a parent does not come before its child.
    """
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"{parents=}: the parent of {i} must be in [-1, {i}).")


def paths(parents: Parents) -> tuple[tuple[int, ...], ...]:
    """Returns, for each position, the positions from the context down to it."""
    check_parents(parents)
    found: list[tuple[int, ...]] = []
    for i, parent in enumerate(parents):
        found.append((*(found[parent] if parent >= 0 else ()), i))
    return tuple(found)


def depth(parents: Parents) -> int:
    """Returns the length of the longest path: tokens that a pass may accept."""
    return max((len(path) for path in paths(parents)), default=0)


def drafts_over(table: TableModel, parents: Parents) -> Drafts:
    """Returns a drafter that draws every position from the draft law of its path.

    Args:
      table: the laws.
      parents: the topology; siblings are independent and may be equal.

    Returns:
      Every proposal, V ** N of them.
    """
    vocab, n_drafts = table.vocab_size, len(parents)
    tokens = np.array(list(np.ndindex(*(vocab,) * n_drafts)), int)
    tokens = tokens.reshape(vocab**n_drafts, n_drafts)
    laws = np.zeros((*tokens.shape, vocab))
    for i, path in enumerate(paths(parents)):
        before = list(path[:-1])
        laws[:, i] = table.draft_rows[len(before)][numbers(tokens[:, before], vocab)]
    with np.errstate(divide="ignore"):
        logprobs = np.log(laws)
    chosen = np.take_along_axis(laws, tokens[..., None], axis=-1)[..., 0]
    return Drafts(
        probability=chosen.prod(-1),
        tokens=tokens.astype(np.int32),
        logprobs=logprobs,
        n_valid=np.full(len(tokens), n_drafts, np.int32),
    )


def target_scores(
    table: TableModel, tokens: np.ndarray, parents: Parents
) -> np.ndarray:
    """Returns the target's log-probabilities of a proposal's rows.

    Args:
      table: the laws.
      tokens: draft tokens, [R, N].
      parents: their topology.

    Returns:
      float64 [R, N + 1, V]; row 0 after the context, row i + 1 after position i.
    """
    rows = [np.tile(table.target(()), (len(tokens), 1))]
    for path in paths(parents):
        index = numbers(tokens[:, list(path)], table.vocab_size)
        rows.append(table.target_rows[len(path)][index])
    with np.errstate(divide="ignore"):
        return np.log(np.stack(rows, axis=1))


def numbers(prefix: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the rows of prefixes [R, n] within their level of a table."""
    index = np.zeros(len(prefix), np.int64)
    for column in prefix.T:
        index = index * vocab_size + column
    return index
