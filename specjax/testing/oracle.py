"""The exact law of what a verify rule emits, by enumeration on a table model.

A rule is a pure function of (proposal, target scores, noise), so its law needs no
sampling and no second copy of it: ``rule_law`` runs the rule's own ``verify`` on every
proposal and forces every outcome through the noise.

* ``uniform``: every pattern of passed and failed tests is forced by uniforms of 0 and
  of the largest number below 1, and weighted by the rule's ``accept_prob`` (or
  ``test_prob``, where a rule's position i may be accepted although its own test
  failed). That these are the real thresholds, and that ``next_weights`` is the law
  that the next token is drawn from, is checked with uniforms around and between.
* ``gumbel``: every choice of one token a row is forced by noise, and weighted by the
  target's probabilities; argmax(log p + Gumbel) has the law p. ``sample_rule`` checks
  that last step on real noise.
* ``none``: there is one outcome.

What a pass emits is extended to gamma + 1 tokens with the target's own law, and
compared with the target's law of gamma + 1 tokens: ``total_variation`` is the rule's
bias, to rounding. A chain rule has ``Verdict`` alone; rules over other shapes of draft
add their own enumeration of outcomes and share the rest.

Example::

    table = random_table(0, vocab_size=3, depth=3)
    law = rule_law(rejection, table, 2)
    assert total_variation(law.tokens, target_law(table, 3)) < 1e-6
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import Proposal
from specjax.sampling import UniformNoise, gumbel_noise, uniform_noise
from specjax.testing.tables import Drafts, TableModel, sampled_drafts
from specjax.verify import Verdict, VerifyRule

# Relative distance from a threshold at which tests are probed, and the number of
# uniforms between 0 and 1 with which the next token's law is probed.
_NEAR, _N_DRAWS = 1e-5, 32

# Enough to beat every finite score of a table.
_FORCE = 1e6


class RuleLaw(NamedTuple):
    """What a rule does on a table.

    Attributes:
      tokens: law of the first gamma + 1 tokens, float64, [V] * (gamma + 1).
      n_accepted: law of the number of accepted drafts, float64 [gamma + 1].
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


class Samples(NamedTuple):
    """Draws from a rule: gamma + 1 tokens and accepted drafts, [n, G + 1] and [n]."""

    tokens: np.ndarray
    n_accepted: np.ndarray


class _Outcomes(NamedTuple):
    """Forced outcomes: one line each, grouped by draft."""

    draft: np.ndarray
    weight: np.ndarray
    n_accepted: np.ndarray
    next_law: np.ndarray
    dtype: np.dtype


def rule_law(
    rule: VerifyRule,
    table: TableModel,
    gamma: int,
    *,
    drafts: Drafts | None = None,
    dtype: Any = np.float32,
) -> RuleLaw:
    """Computes the law of what a rule emits on a table.

    Args:
      rule: any chain rule. A greedy rule is judged on ``table.greedy()``.
      table: laws of depth gamma + 1 or more.
      gamma: draft tokens.
      drafts: what is proposed; gamma tokens drawn from the draft law when None.
      dtype: of the scores and log-probabilities; float64 turns on x64 in JAX.

    Returns:
      The law.

    Raises:
      ValueError: the table is too shallow, or the rule contradicts itself: counts out
        of range, thresholds other than the ones it reports, negative weights.
    """
    if table.depth < gamma + 1:
        raise ValueError(f"{table.depth=} must be at least {gamma + 1=}.")
    drafts = sampled_drafts(table, gamma) if drafts is None else drafts
    dtype = np.dtype(dtype)
    enumerate_outcomes = {
        "none": _forced_nothing,
        "uniform": _forced_uniforms,
        "gumbel": _forced_choices,
    }[rule.noise]
    with jax.enable_x64(dtype == np.float64):
        outcomes = enumerate_outcomes(rule, table, drafts, dtype)
    return _collect(table, gamma, drafts, outcomes)


def target_law(
    table: TableModel, n_tokens: int, prefix: tuple[int, ...] = ()
) -> np.ndarray:
    """Returns the target's law of the next ``n_tokens`` tokens, [V] * n_tokens."""
    if n_tokens == 0:
        return np.ones(())
    p = table.target(prefix)
    if n_tokens == 1:
        return p
    rest = [
        target_law(table, n_tokens - 1, (*prefix, v)) for v in range(table.vocab_size)
    ]
    return np.stack([w * law for w, law in zip(p, rest, strict=True)])


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
      rule: a chain rule with noise.
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
    scores = jnp.asarray(_target_scores(table, tokens), jnp.float32)
    verdict = jax.jit(rule.verify)(
        proposal, scores, noise if gumbel is None else gumbel
    )
    n_accepted = np.asarray(verdict.n_accepted)
    at = np.arange(gamma + 1)[None, :]
    out = np.where(at < n_accepted[:, None], np.pad(tokens, ((0, 0), (0, 1))), 0)
    out[np.arange(n_samples), n_accepted] = np.asarray(verdict.next_token)
    for i in range(1, gamma + 1):
        law = table.target_rows[i][_numbers(out[:, :i], table.vocab_size)]
        out[:, i] = np.where(i > n_accepted, _draw(law, rng), out[:, i])
    return Samples(out, n_accepted)


def count(samples: Samples, vocab_size: int) -> np.ndarray:
    """Returns how often each sequence of tokens came, [V] * (gamma + 1)."""
    n_tokens = samples.tokens.shape[1]
    counts = np.bincount(
        _numbers(samples.tokens, vocab_size), minlength=vocab_size**n_tokens
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


def _forced_uniforms(
    rule: VerifyRule, table: TableModel, drafts: Drafts, dtype: np.dtype
) -> _Outcomes:
    """Forces every pattern of passed and failed tests."""
    n_drafts = drafts.tokens.shape[1]
    patterns = np.array(list(np.ndindex(*(2,) * n_drafts)), bool)
    run = _runner(rule, table, drafts, dtype, len(patterns))
    passed = np.tile(patterns, (len(drafts.tokens), 1))
    below_one = np.nextafter(dtype.type(1), dtype.type(0))
    half = np.full(len(passed), 0.5, dtype)

    verdict = run(_uniform(np.where(passed, 0, below_one).astype(dtype), half))
    info = verdict.info
    chance = np.asarray(info.get("test_prob", info["accept_prob"]))
    weights = np.asarray(info["next_weights"])
    precision = weights.dtype
    chance, weights = chance.astype(np.float64), weights.astype(np.float64)
    if not np.all((chance >= 0) & (chance <= 1)):
        raise ValueError(f"{rule.name!r} reports probabilities outside [0, 1].")
    n_accepted = _checked_count(rule, verdict, drafts, len(patterns))
    weight = np.where(passed, chance, 1 - chance).prod(-1)
    total = weights.sum(-1)
    live = weight > 0
    if np.any((weights < 0) & live[:, None]) or not np.all(total[live] > 0):
        raise ValueError(f"{rule.name!r} has next_weights that are no law.")
    next_law = weights / np.where(total > 0, total, 1)[:, None]

    # The thresholds are what is reported: just below passes, just above fails.
    near = np.where(passed, chance * (1 - _NEAR), chance * (1 + _NEAR) + 1e-9)
    near = np.minimum(near, below_one).astype(dtype)
    clear = live & np.all(passed | (chance <= 1 - 1e-6), -1)
    other = np.asarray(run(_uniform(near, half)).n_accepted)
    if np.any((other != n_accepted) & clear):
        raise ValueError(f"{rule.name!r} decides otherwise than it reports.")
    _check_draws(rule, run, passed, next_law, clear, below_one)
    return _Outcomes(
        np.repeat(np.arange(len(drafts.tokens)), len(patterns)),
        weight,
        n_accepted,
        next_law,
        precision,
    )


def _uniform(accept: np.ndarray, draw: np.ndarray) -> UniformNoise:
    return UniformNoise(jnp.asarray(accept), jnp.asarray(draw))


def _check_draws(
    rule: VerifyRule,
    run: Callable[[UniformNoise], Verdict],
    passed: np.ndarray,
    next_law: np.ndarray,
    live: np.ndarray,
    below_one: np.floating,
) -> None:
    """Checks that the next token is drawn from the law that is reported."""
    accept = np.where(passed, 0, below_one).astype(below_one.dtype)
    seen = np.zeros_like(next_law)
    for k in range(_N_DRAWS):
        u = np.full(len(passed), (k + 0.5) / _N_DRAWS, below_one.dtype)
        token = np.asarray(run(_uniform(accept, u)).next_token)
        seen[np.arange(len(token)), token] += 1 / _N_DRAWS
    # An interval of width w holds wK midpoints of a grid of K, one more or one fewer.
    far = np.abs(seen - next_law).max(-1) > 1 / _N_DRAWS + 1e-5
    if np.any(far & live):
        raise ValueError(f"{rule.name!r} draws from another law than next_weights.")


def _forced_choices(
    rule: VerifyRule, table: TableModel, drafts: Drafts, dtype: np.dtype
) -> _Outcomes:
    """Forces every choice of a token in every row of the target."""
    vocab, n_rows = table.vocab_size, drafts.tokens.shape[1] + 1
    choices = np.array(list(np.ndindex(*(vocab,) * n_rows)))
    n_drafts = len(drafts.tokens)
    laws = np.exp(_target_scores(table, drafts.tokens))
    weight = np.ones((n_drafts, len(choices)))
    for i in range(n_rows):
        weight *= laws[:, i, choices[:, i]]
    noise = _FORCE * np.eye(vocab, dtype=dtype)[choices]
    run = _runner(rule, table, drafts, dtype, len(choices))
    verdict = run(jnp.asarray(np.tile(noise, (n_drafts, 1, 1))))
    return _Outcomes(
        np.repeat(np.arange(n_drafts), len(choices)),
        weight.reshape(-1),
        _checked_count(rule, verdict, drafts, len(choices)),
        np.eye(vocab)[np.asarray(verdict.next_token)],
        dtype,
    )


def _forced_nothing(
    rule: VerifyRule, table: TableModel, drafts: Drafts, dtype: np.dtype
) -> _Outcomes:
    """Runs a rule without noise."""
    verdict = _runner(rule, table, drafts, dtype, 1)(None)
    return _Outcomes(
        np.arange(len(drafts.tokens)),
        np.ones(len(drafts.tokens)),
        _checked_count(rule, verdict, drafts, 1),
        np.eye(table.vocab_size)[np.asarray(verdict.next_token)],
        dtype,
    )


def _runner(
    rule: VerifyRule, table: TableModel, drafts: Drafts, dtype: np.dtype, repeat: int
) -> Callable[[Any], Verdict]:
    """Returns noise -> verdict, with every draft repeated ``repeat`` times."""
    again = lambda x: jnp.asarray(np.repeat(x, repeat, axis=0))
    logprobs = drafts.logprobs
    proposal = Proposal(
        tokens=again(drafts.tokens),
        logprobs=None if logprobs is None else again(logprobs.astype(dtype)),
        n_valid=again(drafts.n_valid),
    )
    scores = again(_target_scores(table, drafts.tokens).astype(dtype))
    verify = jax.jit(rule.verify)
    return lambda noise: verify(proposal, scores, noise)


def _checked_count(
    rule: VerifyRule, verdict: Verdict, drafts: Drafts, repeat: int
) -> np.ndarray:
    n_accepted = np.asarray(verdict.n_accepted)
    if np.any((n_accepted < 0) | (n_accepted > np.repeat(drafts.n_valid, repeat))):
        raise ValueError(f"{rule.name!r} accepts a count outside [0, n_valid].")
    return n_accepted


def _collect(
    table: TableModel, gamma: int, drafts: Drafts, outcomes: _Outcomes
) -> RuleLaw:
    """Adds outcomes up to the law of gamma + 1 tokens."""
    vocab = table.vocab_size
    by_prefix: dict[tuple[int, ...], np.ndarray] = {}
    counts = np.zeros(gamma + 1)
    n_impossible = 0
    weight = outcomes.weight * drafts.probability[outcomes.draft]
    for r, n, w, law in zip(
        outcomes.draft, outcomes.n_accepted, weight, outcomes.next_law, strict=True
    ):
        prefix = tuple(int(x) for x in drafts.tokens[r, :n])
        n_impossible += any(
            table.target(prefix[:i])[x] == 0 for i, x in enumerate(prefix)
        )
        if w > 0:
            counts[n] += w
            mass = by_prefix.setdefault(prefix, np.zeros(vocab))
            mass += w * law
    tokens = np.zeros((vocab,) * (gamma + 1))
    for prefix, mass in by_prefix.items():
        for v in np.flatnonzero(mass):
            rest = target_law(table, gamma - len(prefix), (*prefix, int(v)))
            tokens[(*prefix, v)] += mass[v] * rest
    return RuleLaw(tokens, counts, n_impossible, np.dtype(outcomes.dtype))


def _target_scores(table: TableModel, tokens: np.ndarray) -> np.ndarray:
    """Returns the target's log-probabilities along drafts, float64 [R, N + 1, V]."""
    n_drafts, vocab = tokens.shape[1], table.vocab_size
    laws = [
        table.target_rows[i][_numbers(tokens[:, :i], vocab)]
        for i in range(n_drafts + 1)
    ]
    with np.errstate(divide="ignore"):
        return np.log(np.stack(laws, axis=1))


def _numbers(prefix: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns the rows of prefixes [R, n] within their level."""
    index = np.zeros(len(prefix), np.int64)
    for column in prefix.T:
        index = index * vocab_size + column
    return index


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
        law = table.draft_rows[i][_numbers(tokens[:, :i], table.vocab_size)]
        with np.errstate(divide="ignore"):
            logprobs[:, i] = np.log(law)
        if noise is None:
            tokens[:, i] = _draw(law, rng)
        else:
            tokens[:, i] = np.argmax(logprobs[:, i] + noise[:, i], axis=-1)
    return tokens, logprobs
