"""Table models: target and draft laws small enough to enumerate.

A table model gives a next-token law for every prefix up to a depth, for the target and
for a draft. Everything that depends on it can be computed exactly in float64, which is
what ``oracle`` does with verify rules.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class TableModel:
    """Next-token laws of a target and of a draft, by prefix.

    Attributes:
      target_rows: level i has the target's laws after i tokens, float64
        [V**i, V]; a prefix is numbered as a base-V number, first token first.
      draft_rows: the draft's, likewise.
    """

    target_rows: tuple[np.ndarray, ...]
    draft_rows: tuple[np.ndarray, ...]

    @property
    def vocab_size(self) -> int:
        """Tokens V."""
        return self.target_rows[0].shape[-1]

    @property
    def depth(self) -> int:
        """Prefix lengths with a law: 0 to depth - 1."""
        return len(self.target_rows)

    def target(self, prefix: Sequence[int]) -> np.ndarray:
        """Returns the target's law after a prefix, float64 [V]."""
        return self.target_rows[len(prefix)][self.number(prefix)]

    def draft(self, prefix: Sequence[int]) -> np.ndarray:
        """Returns the draft's law after a prefix, float64 [V]."""
        return self.draft_rows[len(prefix)][self.number(prefix)]

    def number(self, prefix: Sequence[int]) -> int:
        """Returns a prefix's row within its level."""
        index = 0
        for token in prefix:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"{prefix=} has ids outside [0, {self.vocab_size}).")
            index = index * self.vocab_size + int(token)
        return index

    def greedy(self) -> "TableModel":
        """Returns the table at temperature 0: the target is its (lowest) argmax."""
        rows = tuple(
            np.eye(self.vocab_size)[np.argmax(level, -1)] for level in self.target_rows
        )
        return dataclasses.replace(self, target_rows=rows)


class Drafts(NamedTuple):
    """Every proposal a drafter may make, and how likely each is.

    Attributes:
      probability: of each proposal, float64 [R]; sums to 1.
      tokens: [R, N] int32.
      logprobs: natural log of the laws the tokens were drawn from, float64
        [R, N, V], -inf for probability 0; None for point masses. Of a tree, entry r
        is the law of the children of row r of the pass, as in ``Proposal``.
      n_valid: how many of a proposal's tokens count, [R] int32.
      parents: of trees whose shape is not the same for all, [R, N] int32; None where
        it is that of the topology they are used with.
    """

    probability: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray | None
    n_valid: np.ndarray
    parents: np.ndarray | None = None


def random_table(
    seed: int, *, vocab_size: int, depth: int, zeros: bool = False
) -> TableModel:
    """Makes a table with random laws.

    Args:
      seed: of NumPy's generator; the table is a function of the arguments.
      vocab_size: tokens, 2 or more.
      depth: prefix lengths with a law; gamma + 1 to verify gamma drafts.
      zeros: whether about a third of the probabilities are 0, in either law
        without the other, and about a fifth of the rows have both laws equal.

    Returns:
      The table.
    """
    if vocab_size < 2 or depth < 1:
        raise ValueError(f"{vocab_size=} must be at least 2 and {depth=} at least 1.")
    rng = np.random.default_rng([seed, vocab_size, depth, zeros])

    def laws(n_rows: int) -> np.ndarray:
        rows = rng.dirichlet(np.ones(vocab_size), n_rows) + 0.01
        if zeros:
            spared = rng.integers(vocab_size, size=n_rows)[:, None]
            wiped = rng.random(rows.shape) < 1 / 3
            rows[wiped & (np.arange(vocab_size)[None, :] != spared)] = 0
        return rows / rows.sum(-1, keepdims=True)

    targets, drafts = [], []
    for level in range(depth):
        target, draft = laws(vocab_size**level), laws(vocab_size**level)
        if zeros:
            equal = rng.random(len(target)) < 1 / 5
            draft[equal] = target[equal]
        targets.append(target)
        drafts.append(draft)
    return TableModel(tuple(targets), tuple(drafts))


def constant_table(
    target: Sequence[float], draft: Sequence[float], *, depth: int
) -> TableModel:
    """Makes a table whose laws are the same after every prefix.

    Args:
      target: the target's law.
      draft: the draft's law.
      depth: prefix lengths with a law.

    Returns:
      The table.
    """
    p, q = np.asarray(target, np.float64), np.asarray(draft, np.float64)
    for law in (p, q):
        if law.ndim != 1 or law.shape != p.shape or abs(law.sum() - 1) > 1e-9:
            raise ValueError(f"{target=} and {draft=} must be laws over one V.")
    return TableModel(
        tuple(np.tile(p, (len(p) ** level, 1)) for level in range(depth)),
        tuple(np.tile(q, (len(q) ** level, 1)) for level in range(depth)),
    )


def sampled_drafts(table: TableModel, gamma: int) -> Drafts:
    """Returns a drafter that draws gamma tokens from the table's draft law."""
    vocab = table.vocab_size
    shape = (vocab,) * gamma
    tokens = np.stack(np.unravel_index(np.arange(vocab**gamma), shape), axis=-1)
    laws = np.stack([[table.draft(x[:i]) for i in range(gamma)] for x in tokens])
    with np.errstate(divide="ignore"):
        logprobs = np.log(laws)
    chosen = np.take_along_axis(laws, tokens[..., None], axis=-1)[..., 0]
    return Drafts(
        probability=chosen.prod(-1),
        tokens=tokens.astype(np.int32),
        logprobs=logprobs,
        n_valid=np.full(len(tokens), gamma, np.int32),
    )


def point_drafts(
    table: TableModel, gamma: int, tokens: Sequence[int] | None = None
) -> Drafts:
    """Returns a drafter that always proposes the same tokens, as point masses.

    Args:
      table: the laws.
      gamma: draft tokens.
      tokens: what it proposes; the draft law's argmaxes when None.

    Returns:
      The one proposal.
    """
    if tokens is None:
        tokens = []
        for _ in range(gamma):
            tokens.append(int(np.argmax(table.draft(tokens))))
    if len(tokens) != gamma:
        raise ValueError(f"{tokens=} must have {gamma=} entries.")
    return Drafts(
        probability=np.ones(1),
        tokens=np.asarray(tokens, np.int32).reshape(1, gamma),
        logprobs=None,
        n_valid=np.full(1, gamma, np.int32),
    )
