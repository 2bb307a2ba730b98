"""Runs rules on real noise, and tests what comes out; see ``oracle``."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import Proposal
from specjax.sampling import gumbel_noise, uniform_noise
from specjax.testing._forced import evidence_for
from specjax.testing.tables import TableModel
from specjax.testing.topology import chain, numbers, target_scores
from specjax.verify import VerifyRule


class Samples(NamedTuple):
    """Draws from a rule: gamma + 1 tokens and accepted drafts, [n, G + 1] and [n]."""

    tokens: np.ndarray
    n_accepted: np.ndarray


def sample_rule(
    rule: VerifyRule,
    table: TableModel,
    gamma: int,
    *,
    n_samples: int,
    seed: int = 0,
    coupled_drafts: bool = False,
) -> Samples:
    """Runs a rule on real noise: one request seed a sample.

    Args:
      rule: a chain rule with noise; ``Evidence`` is made of the table's own laws.
      table: laws of depth gamma + 1 or more.
      gamma: draft tokens, drawn from the draft law.
      n_samples: passes.
      seed: the requests' seeds are ``seed * n_samples`` and those that follow.
      coupled_drafts: draw the drafts with the noise that the rule gets (``gumbel``
        rules only; then no ``logprobs`` are passed on).

    Returns:
      The passes, each extended to gamma + 1 tokens with the target's law.
    """
    if coupled_drafts and rule.noise != "gumbel":
        raise ValueError(f"{rule.name!r} takes {rule.noise!r} noise, not 'gumbel'.")
    seeds = jnp.arange(n_samples, dtype=jnp.uint32) + np.uint32(seed * n_samples)
    length = jnp.full((n_samples,), 7, jnp.int32)
    position = length[:, None] + jnp.arange(gamma + 1)[None, :]
    rng = np.random.default_rng([seed, n_samples])
    gumbel = None
    if rule.noise == "gumbel":
        gumbel = jax.jit(gumbel_noise, static_argnums=2)(
            seeds, position, table.vocab_size
        )
    noise = jax.jit(uniform_noise, static_argnums=2)(seeds, length, gamma)
    own = np.asarray(gumbel) if coupled_drafts else None
    tokens, logprobs = _draw_drafts(table, gamma, n_samples, rng, own)
    proposal = Proposal(
        tokens=jnp.asarray(tokens),
        logprobs=None if coupled_drafts else jnp.asarray(logprobs, jnp.float32),
        n_valid=jnp.full((n_samples,), gamma, jnp.int32),
    )
    scores = target_scores(table, tokens, chain(gamma))
    verdict = jax.jit(rule.verify)(
        proposal,
        jnp.asarray(scores, jnp.float32),
        noise if gumbel is None else gumbel,
        *evidence_for(rule, tokens, scores, jnp.float32),
    )
    n_accepted = np.asarray(verdict.n_accepted)
    at = np.arange(gamma + 1)[None, :]
    out = np.where(at < n_accepted[:, None], np.pad(tokens, ((0, 0), (0, 1))), 0)
    out[np.arange(n_samples), n_accepted] = np.asarray(verdict.next_token)
    for i in range(1, gamma + 1):
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
    gamma: int,
    n_samples: int,
    rng: np.random.Generator,
    noise: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws drafts, with their log-probabilities; from given Gumbel noise if any."""
    tokens = np.zeros((n_samples, gamma), np.int32)
    logprobs = np.zeros((n_samples, gamma, table.vocab_size))
    for i in range(gamma):
        law = table.draft_rows[i][numbers(tokens[:, :i], table.vocab_size)]
        with np.errstate(divide="ignore"):
            logprobs[:, i] = np.log(law)
        if noise is None:
            tokens[:, i] = _draw(law, rng)
        else:
            tokens[:, i] = np.argmax(logprobs[:, i] + noise[:, i], axis=-1)
    return tokens, logprobs
