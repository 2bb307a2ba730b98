"""Wrong implementations that tests must catch.

A proof is worth what it refuses. Each mutant is a mistake that was made somewhere or
is easy to make; ``rule_fault`` is what catches those of verify rules.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from specjax.drafters import Proposal
from specjax.testing.oracle import (
    count,
    g_test,
    rule_law,
    sample_rule,
    target_law,
    total_variation,
)
from specjax.testing.reference_rules import block_rule, match_rule, token_rule
from specjax.testing.tables import (
    Drafts,
    TableModel,
    point_drafts,
    random_table,
    sampled_drafts,
)
from specjax.typing import Array
from specjax.verify import Verdict, VerifyRule, accepted_prefix, coupled


class Mutant(NamedTuple):
    """A planted mistake.

    Attributes:
      name: short, unique.
      what: the mistake, in words.
      kind: what is wrong; ``rule`` for a verify rule.
      make: () -> the wrong thing, the same one each time.
    """

    name: str
    what: str
    kind: Literal["rule"]
    make: Callable[[], Any]


def rule_fault(rule: VerifyRule, *, least: float = 1e-5) -> str | None:
    """Looks for a fault of a chain rule that claims to be lossless.

    Args:
      rule: the rule.
      least: bias that counts; above the rounding of float32 rules, about 1e-7.

    Returns:
      What is wrong, or None: the law is not the target's, an impossible token may be
      accepted, or the rule does not do what it reports.
    """
    for name, table, drafts in _situations():
        table = table.greedy() if rule.greedy_only else table
        try:
            law = rule_law(rule, table, 2, drafts=drafts)
        except ValueError as error:
            return f"{name}: {error}"
        bias = total_variation(law.tokens, target_law(table, 3))
        if not bias < least:
            return f"{name}: bias {bias:.1e}"
        if law.n_impossible:
            return f"{name}: accepts what the target excludes"
    if rule.noise == "gumbel":
        # Forced choices cannot see what is done to the scores before the argmax.
        table = random_table(11, vocab_size=3, depth=3)
        samples = sample_rule(rule, table, 2, n_samples=100_000)
        p_value = g_test(count(samples, 3), target_law(table, 3))
        if p_value < 1e-4:
            return f"real noise: p-value {p_value:.1e}"
    return None


@functools.cache
def _situations() -> tuple[tuple[str, TableModel, Drafts], ...]:
    """Returns names, tables and drafts of two tokens, those that show most first."""
    # Four tokens: a residual on one token would hide mistakes in its weights. One
    # shape, so that a rule is compiled once for all but the last.
    full = random_table(4, vocab_size=4, depth=3)
    zeros = random_table(14, vocab_size=4, depth=3, zeros=True)
    drawn = sampled_drafts(full, 2)
    # How many count is known before the next one is drawn.
    fewer = drawn._replace(n_valid=2 - drawn.tokens[:, 0] % 2)
    return (
        ("drawn drafts", full, drawn),
        ("zeros", zeros, sampled_drafts(zeros, 2)),
        ("rows of unequal length", full, fewer),
        ("point masses", full, point_drafts(full, 2)),
    )


def _ratio(factor: float = 1.0, extra: float = 0.0) -> dict[str, Callable[..., Array]]:
    """Acceptance with the ratio p/q changed, told truthfully."""
    change = lambda p, q: jnp.where(q > 0, factor * p / (q + extra), 1.0)
    return {
        "passes": lambda u, p, q: u < jnp.where(p > 0, change(p, q), 0),
        "chance": lambda p, q: jnp.where(p > 0, jnp.minimum(change(p, q), 1), 0),
    }


def _coupled_accepts_the_likely(
    proposal: Proposal, scores: Array, noise: Array
) -> Verdict:
    chosen = jnp.argmax(scores + noise, axis=-1)
    n_drafts = proposal.tokens.shape[1]
    score = jnp.take_along_axis(scores[:, :n_drafts], proposal.tokens[..., None], -1)
    n = accepted_prefix(score[..., 0] > -1.0, proposal.n_valid)
    return Verdict(n, jnp.take_along_axis(chosen, n[:, None], 1)[:, 0], {})


def _coupled_row_before(proposal: Proposal, scores: Array, noise: Array) -> Verdict:
    chosen = jnp.argmax(scores + noise, axis=-1)
    n_drafts = proposal.tokens.shape[1]
    n = accepted_prefix(proposal.tokens == chosen[:, :n_drafts], proposal.n_valid)
    at = jnp.minimum(n, n_drafts - 1)
    return Verdict(n, jnp.take_along_axis(chosen, at[:, None], 1)[:, 0], {})


def _coupled_sharpened(proposal: Proposal, scores: Array, noise: Array) -> Verdict:
    return coupled.verify(proposal, 1.05 * scores, noise)


def _mutant(
    name: str, what: str, make: Callable[..., VerifyRule], **handles: Any
) -> Mutant:
    # Made once, so that all who ask share its compiled programs.
    return Mutant(
        name, what, "rule", functools.cache(functools.partial(make, name, **handles))
    )


def _gumbel(name: str, verify: Callable[..., Verdict]) -> VerifyRule:
    return VerifyRule(name, False, "gumbel", False, verify)


_TOKEN = (
    _mutant("token_p", "the residual is p", token_rule, residual=lambda p, q: p),
    _mutant(
        "token_abs",
        "the residual is |p - q|",
        token_rule,
        residual=lambda p, q: jnp.abs(p - q),
    ),
    _mutant(
        "token_98",
        "the residual is max(p - 0.98 q, 0)",
        token_rule,
        residual=lambda p, q: jnp.maximum(p - 0.98 * q, 0),
    ),
    _mutant("token_q1", "q of a drawn draft is taken as 1", token_rule, point=True),
    _mutant(
        "token_bonus_before",
        "the bonus token comes from the row before",
        token_rule,
        row=lambda n, n_drafts: jnp.minimum(n, n_drafts - 1),
    ),
    _mutant(
        "token_row_after",
        "the correction comes from the row after",
        token_rule,
        row=lambda n, n_drafts: jnp.minimum(n + 1, n_drafts),
    ),
    _mutant(
        "token_generous", "accepts 2 % too often", token_rule, **_ratio(factor=1.02)
    ),
    _mutant(
        "token_epsilon",
        "p / (q + epsilon) as the ratio",
        token_rule,
        **_ratio(extra=1e-3),
    ),
    _mutant(
        "token_unclamped",
        "the residual is p - q, not clamped at 0",
        token_rule,
        residual=lambda p, q: p - q,
    ),
    _mutant(
        "token_next_p",
        "the next token is drawn from p whatever was rejected",
        token_rule,
        pick=lambda weights, p: p,
    ),
    _mutant(
        "token_threshold",
        "a threshold 2 % off what is reported",
        token_rule,
        passes=lambda u, p, q: 0.98 * u * q < p,
    ),
    _mutant(
        "token_not_strict",
        "accepts where u q = p: an excluded token at u = 0",
        token_rule,
        passes=lambda u, p, q: u * q <= p,
    ),
    _mutant(
        "token_padding",
        "accepts drafts beyond n_valid",
        token_rule,
        limit=lambda proposal: jnp.full_like(
            proposal.n_valid, proposal.tokens.shape[1]
        ),
    ),
)

_BLOCK = (
    _mutant(
        "block_break",
        "stops at the first failed test instead of taking the last success",
        block_rule,
        kept=lambda passed: jnp.cumprod(passed, axis=1).sum(1),
    ),
    _mutant(
        "block_unclamped",
        "w is min(1, product) instead of a product clamped in every step",
        block_rule,
        step=lambda w, ratio: w * ratio,
        shown=lambda w: jnp.minimum(w, 1),
    ),
    _mutant(
        "block_q1", "q of a drawn draft is taken as 1 in w", block_rule, point=True
    ),
    _mutant(
        "block_token_test",
        "the token criterion under the last-success rule, residual max(p - q, 0)",
        block_rule,
        step=lambda w, ratio: jnp.minimum(ratio, 1),
        tests=lambda p, q, w: w,
        residual=lambda p, q, w: jnp.maximum(p - q, 0),
    ),
    _mutant(
        "block_token_residual",
        "the right tests, but the residual of the token rule",
        block_rule,
        residual=lambda p, q, w: jnp.maximum(p - q, 0),
    ),
    _mutant(
        "block_own_row",
        "tests a position by its own row, not the next",
        block_rule,
        shift=-1,
    ),
    _mutant(
        "block_last_of_all",
        "takes the padded block's last position for every row's last",
        block_rule,
        last=lambda proposal: jnp.full_like(proposal.n_valid, proposal.tokens.shape[1]),
    ),
    _mutant(
        "block_not_strict",
        "passes where u = h: an excluded token at u = 0",
        block_rule,
        passes=lambda u, h: u <= h,
    ),
)

_MATCH = (
    _mutant(
        "match_again",
        "draws once more after a mismatch, so that the draft has two chances",
        match_rule,
        again=True,
    ),
    _mutant(
        "match_one_number",
        "one uniform number draws the tokens of all positions",
        match_rule,
        numbers=lambda noise: jnp.broadcast_to(noise.accept[:, :1], noise.accept.shape),
    ),
    _mutant(
        "match_bonus_number",
        "the bonus token is drawn with the number of the last match",
        match_rule,
        bonus=lambda noise: noise.accept[:, -1],
    ),
    _mutant(
        "coupled_likely",
        "accepts drafts that are likely instead of equal",
        _gumbel,
        verify=_coupled_accepts_the_likely,
    ),
    _mutant(
        "coupled_bonus_before",
        "the bonus token comes from the row before",
        _gumbel,
        verify=_coupled_row_before,
    ),
    _mutant(
        "coupled_sharpened",
        "applies a temperature once more",
        _gumbel,
        verify=_coupled_sharpened,
    ),
)

#: Rule-level mutants by name.
RULES: dict[str, Mutant] = {
    mutant.name: mutant for mutant in (*_TOKEN, *_BLOCK, *_MATCH)
}
