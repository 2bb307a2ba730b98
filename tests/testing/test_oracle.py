"""The oracle itself: right where rules are right, and able to say what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify
from specjax.sampling import draw
from specjax.testing.oracle import (
    rule_law,
    sample_rule,
    target_law,
    total_variation,
)
from specjax.testing.reference_rules import block_rule, match_rule, token_rule
from specjax.testing.tables import constant_table, random_table, sampled_drafts
from specjax.verify import Verdict

PAIRS = [
    (verify.rejection, token_rule()),
    (verify.block, block_rule()),
    (verify.sample_and_match, match_rule()),
]


@pytest.mark.parametrize(
    ("rule", "second"), PAIRS, ids=[second.name for _, second in PAIRS]
)
def test_two_implementations_have_one_law(rule, second):
    for seed in range(4):
        table = random_table(seed, vocab_size=3, depth=3, zeros=seed % 2 == 1)
        for stop in (2, 1):
            drafts = sampled_drafts(table, 2)
            drafts = drafts._replace(n_valid=np.full_like(drafts.n_valid, stop))
            one, two = (
                rule_law(r, table, 2, drafts=drafts, dtype=np.float64)
                for r in (rule, second)
            )
            assert total_variation(two.tokens, target_law(table, 3)) < 1e-12
            np.testing.assert_allclose(one.tokens, two.tokens, atol=1e-12)
            np.testing.assert_allclose(one.n_accepted, two.n_accepted, atol=1e-12)


def test_reported_acceptance_is_checked():
    def boasting(proposal, scores, noise):
        verdict = verify.block.verify(proposal, scores, noise)
        # The tests' own probabilities are not those of acceptance.
        info = {**verdict.info, "accept_prob": verdict.info["test_prob"]}
        return verdict._replace(info=info)

    table = random_table(0, vocab_size=3, depth=3)
    with pytest.raises(ValueError, match="accept_prob"):
        rule_law(verify.block._replace(verify=boasting), table, 2)


def test_row_weights_that_are_not_the_draws_are_refused():
    def sharpened(proposal, scores, noise):
        verdict = verify.sample_and_match.verify(proposal, 1.05 * scores, noise)
        rows = jax.nn.softmax(scores[:, :-1], axis=-1)
        return verdict._replace(info={**verdict.info, "row_weights": rows})

    table = random_table(0, vocab_size=3, depth=3)
    with pytest.raises(ValueError, match="otherwise than it reports"):
        rule_law(verify.sample_and_match._replace(verify=sharpened), table, 2)


def test_law_that_is_not_the_targets_shows_its_size():
    def constant(proposal, scores, noise):
        weights = jnp.ones_like(scores[:, 0])
        none = jnp.zeros_like(proposal.n_valid)
        info = {
            "accept_prob": jnp.zeros(proposal.tokens.shape, scores.dtype),
            "next_weights": weights,
        }
        return Verdict(none, draw(weights, noise.draw), info)

    table = constant_table((0.5, 0.3, 0.2), (0.2, 0.3, 0.5), depth=3)
    law = rule_law(verify.rejection._replace(verify=constant), table, 2)
    bias = total_variation(law.tokens, target_law(table, 3))
    np.testing.assert_allclose(bias, 0.5 - 1 / 3, atol=1e-6)
    np.testing.assert_allclose(law.n_accepted, [1, 0, 0])


def test_target_law_continues_a_prefix():
    table = random_table(3, vocab_size=3, depth=4)
    whole = target_law(table, 4)
    np.testing.assert_allclose(whole.sum(), 1)
    for prefix in ((), (2,), (1, 2)):
        rest = target_law(table, 4 - len(prefix), prefix)
        first = target_law(table, len(prefix))[prefix]
        np.testing.assert_allclose(whole[prefix], first * rest, atol=1e-15)
    assert target_law(table, 0) == 1


def test_oracle_says_what_it_cannot_do():
    table = random_table(0, vocab_size=2, depth=2)
    with pytest.raises(ValueError, match="depth"):
        rule_law(verify.rejection, table, 2)
    with pytest.raises(ValueError, match=r"verifies chains.*traversal"):
        rule_law(verify.block, table, (-1, -1))
    with pytest.raises(ValueError, match="outside"):
        table.target((2,))
    with pytest.raises(ValueError, match="differ"):
        total_variation(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="gumbel"):
        sample_rule(verify.rejection, table, 1, n_samples=4, coupled_drafts=True)
    with pytest.raises(ValueError, match="laws over one V"):
        constant_table((0.5, 0.6), (0.5, 0.5), depth=1)


def test_tables_are_a_function_of_the_seed():
    a, b, c = (random_table(s, vocab_size=3, depth=3) for s in (4, 4, 5))
    for x, y, z in zip(a.target_rows, b.target_rows, c.target_rows, strict=True):
        np.testing.assert_array_equal(x, y)
        assert not np.array_equal(x, z)
    assert not np.array_equal(a.target((0,)), a.target((1,)))
    for level in (*a.target_rows, *a.draft_rows):
        np.testing.assert_allclose(level.sum(-1), 1, atol=1e-15)
