"""Wrong rules for trees that tests must catch; see ``mutants``."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.testing.mutants import Mutant
from specjax.testing.oracle import rule_law, target_law, total_variation
from specjax.testing.reference_trees import (
    descend_rule,
    in_turn_rule,
    k_seq_rule,
    traversal_rule,
)
from specjax.testing.tables import Drafts, TableModel, random_table
from specjax.testing.topology import SHAPES, drafts_over, top_drafts_over
from specjax.verify import VerifyRule

# Two children, two of the first one's: siblings below and beside one another.
_SHAPE = SHAPES["uneven"]


def tree_fault(rule: VerifyRule, *, least: float = 1e-5) -> str | None:
    """Looks for a fault of a rule for trees that claims to be lossless.

    Args:
      rule: the rule; children are drawn as its ``siblings`` says.
      least: bias that counts; above the rounding of float32 rules, about 1e-7.

    Returns:
      What is wrong, or None: the law is not the target's, an impossible token may be
      accepted, or the rule does not do what it reports.
    """
    for name, table, drafts in _situations(rule.siblings):
        table = table.greedy() if rule.greedy_only else table
        try:
            law = rule_law(rule, table, _SHAPE, drafts=drafts)
        except ValueError as error:
            return f"{name}: {error}"
        bias = total_variation(law.tokens, target_law(table, law.tokens.ndim))
        if not bias < least:
            return f"{name}: bias {bias:.1e}"
        if law.n_impossible:
            return f"{name}: accepts what the target excludes"
    return None


@functools.cache
def _situations(siblings: str) -> tuple[tuple[str, TableModel, Drafts], ...]:
    """Returns names, tables and drafts, those that show most first."""
    full = random_table(4, vocab_size=4, depth=3)
    zeros = random_table(1, vocab_size=4, depth=3, zeros=True)
    kind = "without_replacement" if siblings == "without_replacement" else "iid"
    drawn, holes = (
        drafts_over(table, _SHAPE, siblings=kind) for table in (full, zeros)
    )
    # How many count is known before the next one is drawn.
    fewer = drawn._replace(n_valid=4 - drawn.tokens[:, 0] % 3)
    some = _some if siblings == "any" else lambda drafts: drafts
    return (
        ("drawn children", full, some(drawn)),
        ("zeros", zeros, some(holes)),
        ("trees of unequal size", full, some(fewer)),
        ("point masses", full, top_drafts_over(full, _SHAPE)),
    )


def _some(drafts: Drafts) -> Drafts:
    """Returns some of the proposals: a rule that matches is exact for every one."""
    take = np.random.default_rng(0).choice(len(drafts.tokens), 20, replace=False)
    assert drafts.logprobs is not None
    return drafts._replace(
        probability=np.full(20, 1 / 20),
        tokens=drafts.tokens[take],
        logprobs=drafts.logprobs[take],
        n_valid=drafts.n_valid[take],
    )


def _make(
    make: Callable[..., VerifyRule], siblings: Any, name: str, what: str, **handles: Any
) -> Mutant:
    build = lambda: make(name, **handles)._replace(siblings=siblings)
    # Made once, so that all who ask share its compiled programs.
    return Mutant(name, what, "rule", functools.cache(build))


_keep = lambda s, x: s
_recursive = functools.partial(_make, in_turn_rule, "without_replacement")
_rejection = functools.partial(_make, in_turn_rule, "iid")
_traversal = functools.partial(_make, traversal_rule, "without_replacement")
_k_seq = functools.partial(_make, k_seq_rule, "iid")
_descend = functools.partial(_make, descend_rule, "any")

_IN_TURN = (
    _recursive(
        "recursive_p",
        "every child is tested against p, not what its siblings left",
        tested=lambda r, p: p,
    ),
    _recursive(
        "recursive_unscaled",
        "the residual is not renormalised before the next child",
        left=lambda r, s: jnp.maximum(r - s, 0),
    ),
    _recursive(
        "recursive_q_kept", "a rejected token stays in the draft law", tried=_keep
    ),
    _recursive(
        "recursive_q_unscaled",
        "the draft law is not renormalised without a rejected token",
        tried=lambda s, x: jnp.where(x, 0, s),
    ),
    _recursive("recursive_backwards", "siblings are tested last first", backwards=True),
    _recursive("recursive_last", "the last child that passes is entered", last=True),
    _recursive(
        "recursive_next_p",
        "the next token is drawn from p whatever was rejected",
        bonus=lambda r, p: p,
    ),
    _recursive(
        "recursive_row_above",
        "the next token comes from the parent's row",
        row=lambda row, up: up,
    ),
    _recursive(
        "recursive_exhausted",
        "the draft law of no weight is not made uniform",
        exhausted=False,
    ),
    _recursive(
        "recursive_not_strict",
        "accepts where u q = p: an excluded token at u = 0",
        passes=lambda u, r, s: u * s <= r,
    ),
    _rejection(
        "rejection_without",
        "treats independent draws as draws without replacement",
    ),
    _rejection(
        "rejection_p",
        "every child is tested against p, not what its siblings left",
        tried=_keep,
        tested=lambda r, p: p,
    ),
)

_UPWARDS = (
    _traversal(
        "traversal_unclamped",
        "what a node is reached with may exceed 1",
        enter=lambda a, ratio: a * ratio,
    ),
    _traversal(
        "traversal_reach_kept",
        "a parent is kept as if no child had been rejected",
        again=lambda a, mass: a,
    ),
    _traversal(
        "traversal_unscaled",
        "the residual is max(p - q, 0), not max(a p - q, 0)",
        left=lambda a, p, q: jnp.maximum(p - q, 0),
    ),
    _traversal(
        "traversal_q_kept", "a rejected token stays in the draft law", tried=_keep
    ),
    _traversal(
        "traversal_last", "the last branch with a node that passes is kept", last=True
    ),
    _traversal(
        "traversal_next_p",
        "the next token is drawn from p whatever was rejected",
        bonus=lambda r, p: p,
    ),
    _traversal(
        "traversal_not_strict",
        "passes where u = a: an excluded token at u = 0",
        passes=lambda u, a: u <= a,
    ),
)

_OTHERS = (
    _k_seq(
        "k_seq_no_discount",
        "rho is 1 whatever the number of children",
        discount=lambda p, q, k: jnp.ones_like(k),
    ),
    _k_seq(
        "k_seq_residual",
        "the residual of one child after k",
        left=lambda p, q, rho, times: p - jnp.minimum(q, p / rho),
    ),
    _k_seq(
        "k_seq_all_nodes",
        "k is the size of the tree",
        count=lambda mine, valid: valid,
    ),
    _k_seq(
        "k_seq_padding",
        "children that do not count are counted",
        count=lambda mine, valid: mine,
    ),
    _descend(
        "descend_again",
        "draws once more after a mismatch, so that children have two chances",
        again=True,
    ),
    _descend(
        "descend_each", "every child is compared with a draw of its own", each=True
    ),
    _descend(
        "descend_row_above",
        "the next token comes from the parent's row",
        bonus=lambda row, up: up,
    ),
)

#: Mutants of rules for trees by name.
TREE_RULES: dict[str, Mutant] = {
    mutant.name: mutant for mutant in (*_IN_TURN, *_UPWARDS, *_OTHERS)
}
