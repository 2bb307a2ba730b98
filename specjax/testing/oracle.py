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

Only the enumeration of outcomes knows what shape a draft has. Proposals, scores and the
sum over outcomes (``law_of``) take any topology (see ``topology``).

Example::

    table = random_table(0, vocab_size=3, depth=3)
    law = rule_law(rejection, table, 2)
    assert total_variation(law.tokens, target_law(table, 3)) < 1e-6
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.testing._forced import Outcomes, chain_outcomes
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
      rule: any chain rule. A greedy rule is judged on ``table.greedy()``.
      table: the laws that are sampled from, of depth gamma + 1 or more.
      topology: parents of the draft positions; gamma stands for ``chain(gamma)``, the
        only one that a ``Verdict``, which counts a prefix, can speak of.
      drafts: what is proposed; tokens drawn from the draft law when None.
      dtype: of the scores and log-probabilities; float64 turns on x64 in JAX.
      unwarped: the target's laws before temperature and filters, for rules that look
        at ``Evidence``; None where they are the table's. Which tokens count as
        impossible is then decided by it.

    Returns:
      The law.

    Raises:
      ValueError: the table is too shallow, the topology is no chain, or the rule
        contradicts itself: counts out of range, thresholds or probabilities other
        than the ones it reports, negative weights.
    """
    parents = chain(topology) if isinstance(topology, int) else topology
    if parents != chain(len(parents)):
        raise ValueError(f"{rule.name!r} verifies chains; {parents=} is none.")
    for laws in (table, unwarped or table):
        if laws.depth < len(parents) + 1:
            raise ValueError(f"{laws.depth=} must be at least {len(parents) + 1}.")
    drafts = drafts_over(table, parents) if drafts is None else drafts
    dtype = np.dtype(dtype)
    scores = target_scores(table, drafts.tokens, parents)
    plain = scores
    if unwarped is not None:
        plain = target_scores(unwarped, drafts.tokens, parents)
    with jax.enable_x64(dtype == np.float64):
        outcomes = chain_outcomes(rule, drafts, scores, plain, dtype)
    possible = unwarped if rule.evidence and unwarped is not None else table
    return law_of(table, parents, drafts, outcomes, possible=possible)


def law_of(
    table: TableModel,
    parents: Parents,
    drafts: Drafts,
    outcomes: Outcomes,
    *,
    possible: TableModel | None = None,
) -> RuleLaw:
    """Adds outcomes up to the law of D + 1 tokens.

    Args:
      table: laws that continue what a pass emits.
      parents: any topology, of depth D.
      drafts: the proposals.
      outcomes: what becomes of them.
      possible: laws by which an accepted token is impossible; the table when None.

    Returns:
      The law.
    """
    vocab, n_tokens = table.vocab_size, depth(parents) + 1
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
