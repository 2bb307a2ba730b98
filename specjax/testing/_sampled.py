"""Runs rules on real noise, and tests what comes out; see ``oracle``."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import Proposal
from specjax.sampling import gumbel_noise, uniform_noise
from specjax.testing._forced import evidence_for
from specjax.testing.tables import TableModel
from specjax.testing.topology import (
    Parents,
    chain,
    depth,
    draft_rows,
    numbers,
    paths,
    target_scores,
)
from specjax.verify import Verdict, VerifyRule


class Samples(NamedTuple):
    """Draws from a rule: D + 1 tokens and accepted drafts, [n, D + 1] and [n].

    D is the depth of what is proposed, gamma for a chain.
    """

    tokens: np.ndarray
    n_accepted: np.ndarray


def sample_rule(
    rule: VerifyRule,
    table: TableModel,
    topology: int | Parents,
    *,
    n_samples: int,
    seed: int = 0,
    coupled_drafts: bool = False,
) -> Samples:
    """Runs a rule on real noise: one request seed a sample.

    Args:
      rule: a rule with noise; ``Evidence`` is made of the table's own laws.
      table: laws of depth D + 1 or more.
      topology: parents of the draft tokens, a tree of depth D, or gamma for a chain.
        They are drawn from the draft law, siblings as the rule wants them.
      n_samples: passes.
      seed: the requests' seeds are ``seed * n_samples`` and those that follow.
      coupled_drafts: draw the drafts with the noise that the rule gets (``gumbel``
        rules only; then no ``logprobs`` are passed on).

    Returns:
      The passes, each extended to D + 1 tokens with the target's law.

    Raises:
      ValueError: drafts cannot be coupled.
    """
    parents = chain(topology) if isinstance(topology, int) else topology
    if coupled_drafts and rule.noise != "gumbel":
        raise ValueError(f"{rule.name!r} takes {rule.noise!r} noise, not 'gumbel'.")
    seeds = jnp.arange(n_samples, dtype=jnp.uint32) + np.uint32(seed * n_samples)
    length = jnp.full((n_samples,), 7, jnp.int32)
    # Rows of equal depth are the same position, and have the same noise.
    depths = np.array([0, *map(len, paths(parents))], np.int32)
    rng = np.random.default_rng([seed, n_samples])
    gumbel = None
    if rule.noise == "gumbel":
        gumbel = jax.jit(gumbel_noise, static_argnums=2)(
            seeds, length[:, None] + depths[None, :], table.vocab_size
        )
    noise = jax.jit(uniform_noise, static_argnums=2)(seeds, length, len(parents))
    own = np.asarray(gumbel) if coupled_drafts else None
    distinct = rule.siblings == "without_replacement"
    tokens, logprobs = _draw_drafts(table, parents, n_samples, rng, own, distinct)
    proposal = Proposal(
        tokens=jnp.asarray(tokens),
        logprobs=None if coupled_drafts else jnp.asarray(logprobs, jnp.float32),
        n_valid=jnp.full((n_samples,), len(parents), jnp.int32),
        parents=None
        if isinstance(topology, int)
        else jnp.tile(jnp.asarray(parents, jnp.int32), (n_samples, 1)),
    )
    scores = target_scores(table, tokens, parents)
    verdict = jax.jit(rule.verify)(
        proposal,
        jnp.asarray(scores, jnp.float32),
        noise if gumbel is None else gumbel,
        *evidence_for(rule, tokens, scores, jnp.float32),
    )
    return _extended(table, parents, tokens, verdict, rng)


def _extended(
    table: TableModel,
    parents: Parents,
    tokens: np.ndarray,
    verdict: Verdict,
    rng: np.random.Generator,
) -> Samples:
    """Extends what passes emit to D + 1 tokens with the target's law."""
    n_accepted = np.asarray(verdict.n_accepted)
    path = np.arange(len(parents))[None, :]
    if verdict.path is not None:
        path = np.maximum(np.asarray(verdict.path), 0)
    kept = np.take_along_axis(tokens, np.broadcast_to(path, tokens.shape), axis=1)
    n_tokens = depth(parents) + 1
    kept = np.pad(kept, ((0, 0), (0, 1)))[:, :n_tokens]
    out = np.where(np.arange(n_tokens)[None, :] < n_accepted[:, None], kept, 0)
    out[np.arange(len(out)), n_accepted] = np.asarray(verdict.next_token)
    for i in range(1, n_tokens):
        law = table.target_rows[i][numbers(out[:, :i], table.vocab_size)]
        out[:, i] = np.where(i > n_accepted, _draw(law, rng), out[:, i])
    return Samples(out, n_accepted)


def count(samples: Samples, vocab_size: int) -> np.ndarray:
    """Returns how often each sequence of tokens came, [V] * (gamma + 1)."""
    n_tokens = samples.tokens.shape[1]
    counts = np.bincount(
        numbers(samples.tokens, vocab_size), minlength=vocab_size**n_tokens
    )
    return counts.reshape((vocab_size,) * n_tokens)


def g_test(counts: np.ndarray, law: np.ndarray) -> float:
    """Returns the p-value of counts under a law, by the likelihood-ratio test.

    Cells with fewer than 5 expected counts are pooled; any count where the law is 0
    gives 0.
    """
    counts, law = np.ravel(counts).astype(np.float64), np.ravel(law)
    if np.any(counts[law == 0] > 0):
        return 0.0
    expected = law / law.sum() * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    seen = observed > 0
    g = 2 * np.sum(observed[seen] * np.log(observed[seen] / expected[seen]))
    freedom = max(len(expected) - 1, 1)
    return float(jax.scipy.special.gammaincc(freedom / 2, max(g, 0.0) / 2))


def _draw(law: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws one token from each row's law."""
    u = rng.random((len(law), 1)) * law.sum(-1, keepdims=True)
    return np.minimum((np.cumsum(law, -1) <= u).sum(-1), law.shape[-1] - 1)


def _draw_drafts(
    table: TableModel,
    parents: Parents,
    n_samples: int,
    rng: np.random.Generator,
    noise: np.ndarray | None,
    distinct: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws drafts, with the laws of their rows; from given Gumbel noise if any.

    Siblings from one noise are the best tokens in turn, as distinct ones are.
    """
    tokens = np.zeros((n_samples, len(parents)), np.int32)
    every = np.arange(n_samples)
    for i, (parent, path) in enumerate(zip(parents, paths(parents), strict=True)):
        level = table.draft_rows[len(path) - 1]
        law = level[numbers(tokens[:, list(path[:-1])], table.vocab_size)].copy()
        if distinct or noise is not None:
            for j in range(i):
                if parents[j] == parent:
                    law[every, tokens[:, j]] = 0
        if noise is None:
            tokens[:, i] = _draw(law, rng)
        else:
            with np.errstate(divide="ignore"):
                tokens[:, i] = np.argmax(np.log(law) + noise[:, parent + 1], axis=-1)
    rows = draft_rows(table, tokens, parents)[:, : len(parents)]
    with np.errstate(divide="ignore"):
        return tokens, np.log(rows)
