"""The exact law of what a verify rule emits, by enumeration on a table model.

A rule is a pure function of (proposal, target scores, noise), so its law needs no
sampling and no second copy of it: ``rule_law`` runs the rule's own ``verify`` on every
proposal and forces every outcome through the noise.

* ``uniform``: each position's uniform number is forced into every cell in which it
  decides the same: passed or failed, with the rule's ``accept_prob`` (or ``test_prob``,
  where a position may be accepted although its own test failed), or one cell a token,
  with its ``row_weights``, where a position draws a token. That these are the real
  edges is checked just inside them; that ``next_weights`` is the law that the next
  token is drawn from, with uniforms between 0 and 1; and that ``accept_prob`` is what
  was found.
* ``gumbel``: every choice of one token a row is forced by noise, and weighted by the
  target's probabilities; argmax(log p + Gumbel) has the law p. ``sample_rule`` checks
  that last step on real noise.
* ``none``: there is one outcome.

What a pass emits is extended to a fixed number of tokens with the target's own law, and
compared with the target's law of as many: ``total_variation`` is the rule's bias, to
rounding. For rules that are lossy by design the law is what they induce.

Drafts may be trees (see ``topology``), of one shape for all proposals or of one for
each (``Drafts.parents``). Under ``gumbel`` noise the choices of all rows are forced
independently. Rows of one depth share their noise in use; but which of them a pass
looks at is settled by lesser depths, and the others' choices change nothing.

Example::

    table = random_table(0, vocab_size=3, depth=3)
    law = rule_law(rejection, table, 2)
    assert total_variation(law.tokens, target_law(table, 3)) < 1e-6
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.testing._forced import Outcomes, force
from specjax.testing._sampled import Samples, count, g_test, sample_rule
from specjax.testing.tables import Drafts, TableModel
from specjax.testing.topology import (
    Parents,
    chain,
    depth,
    drafts_over,
    numbers,
    paths,
    target_scores,
)
from specjax.verify import VerifyRule


class RuleLaw(NamedTuple):
    """What a rule does on a table.

    Attributes:
      tokens: law of the first D + 1 tokens, float64, [V] * (D + 1), D being the depth
        of the topology: gamma for a chain.
      n_accepted: law of the number of accepted drafts, float64 [D + 1].
      n_impossible: forced outcomes, of weight 0 included, that accept a token of
        target probability 0. Must be 0: a uniform of exactly 0 happens.
      dtype: the precision the rule computed its probabilities in; rules that cast to
        float32 have errors of about 1e-7.
    """

    tokens: np.ndarray
    n_accepted: np.ndarray
    n_impossible: int
    dtype: np.dtype

    @property
    def mean_accepted(self) -> float:
        """Expected number of accepted drafts a pass."""
        return float(self.n_accepted @ np.arange(len(self.n_accepted)))


def rule_law(
    rule: VerifyRule,
    table: TableModel,
    topology: int | Parents,
    *,
    drafts: Drafts | None = None,
    dtype: Any = np.float32,
    unwarped: TableModel | None = None,
) -> RuleLaw:
    """Computes the law of what a rule emits on a table.

    Args:
      rule: any rule. A greedy rule is judged on ``table.greedy()``.
      table: the laws that are sampled from, of depth D + 1 or more.
      topology: parents of the draft positions, a tree of depth D even if it is a
        chain; gamma stands for a chain that is proposed as such, of depth gamma.
        Where ``drafts`` have parents of their own, those count.
      drafts: what is proposed; when None tokens drawn from the draft law, siblings
        as the rule wants them.
      dtype: of the scores and log-probabilities; float64 turns on x64 in JAX.
      unwarped: the target's laws before temperature and filters, for rules that look
        at ``Evidence``; None where they are the table's. Which tokens count as
        impossible is then decided by it.

    Returns:
      The law.

    Raises:
      ValueError: the table is too shallow, the rule does not take the topology, or it
        contradicts itself: counts out of range, what is no path, thresholds or
        probabilities other than the ones it reports, negative weights.
    """
    parents = chain(topology) if isinstance(topology, int) else topology
    if drafts is None:
        kind = "iid" if rule.siblings == "any" else rule.siblings
        drafts = drafts_over(table, parents, siblings=kind)
    shapes = _shapes(drafts, parents)
    where = {kind: np.all(shapes == np.array(kind), axis=-1) for kind in _kinds(shapes)}
    n_tokens = max(map(depth, where)) + 1
    for laws in (table, unwarped or table):
        if laws.depth < n_tokens:
            raise ValueError(f"{laws.depth=} must be at least {n_tokens}.")
    scores = _scores_of_shapes(table, drafts.tokens, where)
    plain = _scores_of_shapes(unwarped or table, drafts.tokens, where)
    tree = None if isinstance(topology, int) else shapes
    with jax.enable_x64(dtype == np.float64):
        outcomes = force(rule, drafts, scores, plain, np.dtype(dtype), tree)
    possible = unwarped if rule.evidence and unwarped is not None else table
    laws = [
        law_of(
            table,
            kind,
            drafts,
            _some(outcomes, here[outcomes.draft]),
            possible=possible,
            n_tokens=n_tokens,
        )
        for kind, here in where.items()
    ]
    return _sum(laws)


def _sum(laws: list[RuleLaw]) -> RuleLaw:
    """Puts together the laws of proposals of different shapes."""
    return RuleLaw(
        tokens=np.sum([law.tokens for law in laws], axis=0),
        n_accepted=np.sum([law.n_accepted for law in laws], axis=0),
        n_impossible=sum(law.n_impossible for law in laws),
        dtype=laws[0].dtype,
    )


def _shapes(drafts: Drafts, parents: Parents) -> np.ndarray:
    """Returns the parents of every proposal, [R, N]."""
    if drafts.parents is not None:
        return drafts.parents
    return np.tile(np.array(parents, np.int32), (len(drafts.tokens), 1))


def _kinds(shapes: np.ndarray) -> list[Parents]:
    return sorted({tuple(int(x) for x in shape) for shape in shapes})


def _some(outcomes: Outcomes, mine: np.ndarray) -> Outcomes:
    """Returns the outcomes that are marked."""
    return outcomes._replace(
        draft=outcomes.draft[mine],
        weight=outcomes.weight[mine],
        node=outcomes.node[mine],
        next_law=outcomes.next_law[mine],
    )


def _scores_of_shapes(
    table: TableModel, tokens: np.ndarray, where: dict[Parents, np.ndarray]
) -> np.ndarray:
    """Returns the scores of proposals, each of the shape that marks it."""
    scores = np.zeros((len(tokens), tokens.shape[1] + 1, table.vocab_size))
    for kind, here in where.items():
        scores[here] = target_scores(table, tokens[here], kind)
    return scores


def law_of(
    table: TableModel,
    parents: Parents,
    drafts: Drafts,
    outcomes: Outcomes,
    *,
    possible: TableModel | None = None,
    n_tokens: int | None = None,
) -> RuleLaw:
    """Adds outcomes up to the law of D + 1 tokens.

    Args:
      table: laws that continue what a pass emits.
      parents: any topology, of depth D.
      drafts: the proposals.
      outcomes: what becomes of them.
      possible: laws by which an accepted token is impossible; the table when None.
      n_tokens: tokens of the law, if not D + 1.

    Returns:
      The law.
    """
    vocab = table.vocab_size
    n_tokens = depth(parents) + 1 if n_tokens is None else n_tokens
    possible = table if possible is None else possible
    routes = ((), *paths(parents))
    tokens, counts, n_impossible = np.zeros((vocab,) * n_tokens), np.zeros(n_tokens), 0
    weight = outcomes.weight * drafts.probability[outcomes.draft]
    for node in np.unique(outcomes.node):
        at, route = outcomes.node == node, list(routes[node + 1])
        accepted = drafts.tokens[outcomes.draft[at]][:, route]
        never = np.zeros(len(accepted), bool)
        for i, token in enumerate(accepted.T):
            law = possible.target_rows[i][numbers(accepted[:, :i], vocab)]
            never |= law[np.arange(len(law)), token] == 0
        n_impossible += int(never.sum())
        counts[len(route)] += weight[at].sum()
        mass = np.zeros((vocab ** len(route), vocab))
        given = np.where(weight[at, None] > 0, weight[at, None], 0)
        np.add.at(mass, numbers(accepted, vocab), given * outcomes.next_law[at])
        mass = mass.reshape((vocab,) * (len(route) + 1))
        tokens += _continued(table, mass, n_tokens)
    return RuleLaw(tokens, counts, n_impossible, np.dtype(outcomes.dtype))


def target_law(
    table: TableModel, n_tokens: int, prefix: tuple[int, ...] = ()
) -> np.ndarray:
    """Returns the target's law of the next ``n_tokens`` tokens, [V] * n_tokens."""
    vocab, start = table.vocab_size, table.number(prefix)
    law = np.ones(())
    for i in range(n_tokens):
        rows = table.target_rows[len(prefix) + i]
        rows = rows[start * vocab**i : (start + 1) * vocab**i]
        law = law[..., None] * rows.reshape((vocab,) * (i + 1))
    return law


def _continued(table: TableModel, law: np.ndarray, n_tokens: int) -> np.ndarray:
    """Continues a law of the first tokens with the target's."""
    for i in range(law.ndim, n_tokens):
        rows = table.target_rows[i].reshape((table.vocab_size,) * (i + 1))
        law = law[..., None] * rows
    return law


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Returns half the summed absolute difference of two laws."""
    if a.shape != b.shape:
        raise ValueError(f"{a.shape=} and {b.shape=} differ.")
    return 0.5 * float(np.abs(a - b).sum())


def match_probability(p: np.ndarray, q: np.ndarray) -> float:
    """Returns how often two laws give the same token under shared Gumbel noise.

    References: Daliri, Musco and Suresh, arXiv:2408.07978.
    """
    both = (p > 0) & (q > 0)
    return float(
        sum(1 / np.maximum(p / p[j], q / q[j]).sum() for j in np.flatnonzero(both))
    )


__all__ = [
    "Outcomes",
    "RuleLaw",
    "Samples",
    "count",
    "g_test",
    "law_of",
    "match_probability",
    "rule_law",
    "sample_rule",
    "target_law",
    "total_variation",
]
