"""Shapes of a proposal: which draft token follows which.

A topology is a tuple of parents: ``parents[i]`` is the draft position that position i
follows, -1 where it follows the context itself; parents come before their children. A
chain of three is (-1, 0, 1), a root with two children (-1, -1). The target scores a
proposal in one row more than it has positions: row 0 is the context, row i + 1 is draft
position i.
"""

from typing import Literal

import numpy as np

from specjax.testing.tables import Drafts, TableModel

Parents = tuple[int, ...]

#: Shapes that show what trees can get wrong, by name.
SHAPES: dict[str, Parents] = {
    "chain of 2": (-1, 0),
    "chain of 3": (-1, 0, 1),
    "three children": (-1, -1, -1),
    "uneven": (-1, -1, 0, 0),
    "2 then chain": (-1, -1, 0, 1),
    "2 then chain, depth first": (-1, 0, -1, 2),
    "binary": (-1, -1, 0, 0, 1, 1),
    "uneven, deeper": (-1, -1, 0, 0, 2),
}


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


def drafts_over(
    table: TableModel,
    parents: Parents,
    *,
    siblings: Literal["iid", "without_replacement"] = "iid",
) -> Drafts:
    """Returns a drafter that draws every position from the draft law of its path.

    Args:
      table: the laws.
      parents: the topology.
      siblings: how those of one parent are drawn: independently, so that they may be
        equal, or in turn without replacement, from the law renormalised on what is
        left, and uniformly from the tokens left once the law has none. Of the latter
        a proposal is listed even where its probability is 0.

    Returns:
      Every proposal, V ** N of them or, of distinct siblings, fewer.
    """
    vocab, n_drafts = table.vocab_size, len(parents)
    tokens = np.array(list(np.ndindex(*(vocab,) * n_drafts)), int)
    tokens = tokens.reshape(vocab**n_drafts, n_drafts)
    if siblings == "without_replacement":
        pairs = [(i, j) for i in range(n_drafts) for j in range(i)]
        pairs = [(i, j) for i, j in pairs if parents[i] == parents[j]]
        for i, j in pairs:
            tokens = tokens[tokens[:, i] != tokens[:, j]]
    rows = draft_rows(table, tokens, parents)
    probability, every = np.ones(len(tokens)), np.arange(len(tokens))
    for i, parent in enumerate(parents):
        law = rows[:, parent + 1]
        if siblings == "without_replacement":
            before = [j for j in range(i) if parents[j] == parent]
            law = _untried(law, tokens[:, before])
        probability *= law[every, tokens[:, i]]
    with np.errstate(divide="ignore"):
        logprobs = np.log(rows[:, :n_drafts])
    return Drafts(
        probability=probability,
        tokens=tokens.astype(np.int32),
        logprobs=logprobs,
        n_valid=np.full(len(tokens), n_drafts, np.int32),
    )


def top_drafts_over(table: TableModel, parents: Parents) -> Drafts:
    """Returns a drafter that proposes, as point masses, the likeliest children.

    Args:
      table: the laws.
      parents: the topology; the first child is the draft law's best token, the
        next its second best (ties: lowest id).

    Returns:
      The one proposal.
    """
    tokens = np.zeros((1, len(parents)), int)
    routes = paths(parents)
    for i, parent in enumerate(parents):
        rank = sum(parents[j] == parent for j in range(i))
        law = table.draft(tuple(int(x) for x in tokens[0, list(routes[i][:-1])]))
        tokens[0, i] = np.argsort(-law, kind="stable")[rank]
    return Drafts(
        probability=np.ones(1),
        tokens=tokens.astype(np.int32),
        logprobs=None,
        n_valid=np.full(1, len(parents), np.int32),
    )


def draft_rows(table: TableModel, tokens: np.ndarray, parents: Parents) -> np.ndarray:
    """Returns the draft's laws of the children of a proposal's rows.

    Args:
      table: the laws.
      tokens: draft tokens, [R, N].
      parents: their topology.

    Returns:
      float64 [R, N + 1, V]; row 0 after the context, row i + 1 after position i.
      Uniform where the table is not deep enough: nothing is drawn there.
    """
    return _rows(table.draft_rows, tokens, parents, table.vocab_size)


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
    with np.errstate(divide="ignore"):
        return np.log(_rows(table.target_rows, tokens, parents, table.vocab_size))


def _rows(
    levels: tuple[np.ndarray, ...], tokens: np.ndarray, parents: Parents, vocab: int
) -> np.ndarray:
    """Returns the laws after the context and after each position, [R, N + 1, V]."""
    rows = [np.tile(levels[0][0], (len(tokens), 1))]
    for path in paths(parents):
        if len(path) < len(levels):
            rows.append(levels[len(path)][numbers(tokens[:, list(path)], vocab)])
        else:
            rows.append(np.full((len(tokens), vocab), 1 / vocab))
    return np.stack(rows, axis=1)


def _untried(law: np.ndarray, tried: np.ndarray) -> np.ndarray:
    """Returns laws [R, V] without tokens [R, n]; uniform where nothing is left."""
    left, open_ = law.copy(), np.ones_like(law)
    for column in tried.T:
        left[np.arange(len(law)), column] = 0
        open_[np.arange(len(law)), column] = 0
    left = np.where(left.sum(-1, keepdims=True) > 0, left, open_)
    return left / np.maximum(left.sum(-1, keepdims=True), 1e-300)


def numbers(prefix: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the rows of prefixes [R, n] within their level of a table."""
    index = np.zeros(len(prefix), np.int64)
    for column in prefix.T:
        index = index * vocab_size + column
    return index
