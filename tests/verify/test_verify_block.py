"""Block verification: closed numbers, dominance, and where it is the token rule."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verify
from specjax.drafters import Proposal
from specjax.sampling import UniformNoise
from specjax.testing.oracle import rule_law, target_law, total_variation
from specjax.testing.tables import constant_table, point_drafts, random_table

TOY = ((1 / 3, 2 / 3), (2 / 3, 1 / 3))
A = ((0.5, 0.3, 0.2), (0.2, 0.3, 0.5))
B = ((0.6, 0.25, 0.1, 0.05), (0.3, 0.3, 0.3, 0.1))
C = ((0.7, 0.3), (0.5, 0.5))

# Accepted drafts by gamma from 1: token rule, block, and the bound for a verifier that
# knows both laws of whole blocks.
CLOSED = {
    "toy": (TOY, (2 / 3, 10 / 9, 38 / 27), (2 / 3, 11 / 9, 5 / 3), (2 / 3, 12 / 9)),
    "A": (
        A,
        (0.7, 1.190, 1.533, 1.7731),
        (0.7, 1.250, 1.695, 2.0635),
        (0.7, 1.310, 1.833, 2.2939),
    ),
    "B": (
        B,
        (0.7, 1.190, 1.533, 1.7731),
        (0.7, 1.250, 1.6995, 2.077075),
        (0.7, 1.310, 1.8465, 2.3311),
    ),
    "C": (
        C,
        (0.8, 1.440, 1.952, 2.3616),
        (0.8, 1.500, 2.128, 2.6950),
        (0.8, 1.560, 2.276, 2.9368),
    ),
}
CASES = [
    (name, gamma)
    for name, (_, token, _, _) in CLOSED.items()
    for gamma in range(1, len(token) + 1)
]


@functools.cache
def _laws(name, gamma):
    table = constant_table(*CLOSED[name][0], depth=gamma + 1)
    return tuple(
        rule_law(rule, table, gamma, dtype=np.float64)
        for rule in (verify.rejection, verify.block)
    )


@pytest.mark.parametrize(("name", "gamma"), CASES)
def test_closed_numbers(name, gamma, record_law):
    vector, *expected = CLOSED[name]
    table = constant_table(*vector, depth=gamma + 1)
    for rule, law, numbers in zip(
        (verify.rejection, verify.block), _laws(name, gamma), expected[:2], strict=True
    ):
        np.testing.assert_allclose(law.mean_accepted, numbers[gamma - 1], atol=1e-6)
        error = total_variation(law.tokens, target_law(table, gamma + 1))
        record_law(rule, "drawn", law, error)
        assert error < 1e-12
    token, block = _laws(name, gamma)
    # Emitted tokens of the token rule: (1 - alpha^(gamma + 1)) / (1 - alpha).
    alpha = np.minimum(*map(np.asarray, vector)).sum()
    tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    np.testing.assert_allclose(1 + token.mean_accepted, tokens, atol=1e-12)
    # Nobody keeps more than the overlap of the laws of whole prefixes.
    bound = sum(
        np.minimum(*(_block_law(law, i) for law in vector)).sum()
        for i in range(1, gamma + 1)
    )
    if gamma <= len(expected[2]):
        np.testing.assert_allclose(bound, expected[2][gamma - 1], atol=1e-6)
    assert block.mean_accepted <= bound + 1e-12


def _block_law(law, n):
    return np.prod(list(itertools.product(law, repeat=n)), axis=-1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("toy", (1 / 3, 1 / 9, 1 / 9, 4 / 9)),
        ("A", (0.3, 0.15, 0.105, 0.445)),
        ("B", (0.3, 0.15, 0.1005, 0.4495)),
        ("C", (0.2, 0.1, 0.072, 0.628)),
    ],
)
def test_law_of_the_number_of_accepted_drafts(name, expected):
    # P(n >= i) is the expectation of w_i; the numbers are its differences.
    np.testing.assert_allclose(_laws(name, 3)[1].n_accepted, expected, atol=1e-12)


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab", [2, 3, 4])
def test_block_keeps_at_least_as_much_as_the_token_rule(vocab, gamma, record_law):
    for seed in range(4):
        table = random_table(
            seed + 50, vocab_size=vocab, depth=gamma + 1, zeros=seed % 2 == 1
        )
        laws = []
        for rule in (verify.rejection, verify.block):
            law = rule_law(rule, table, gamma, dtype=np.float64)
            error = total_variation(law.tokens, target_law(table, gamma + 1))
            record_law(rule, "drawn", law, error)
            assert error < 1e-12
            laws.append(law)
        token, block = laws
        assert block.mean_accepted >= token.mean_accepted - 1e-12
        np.testing.assert_allclose(block.mean_accepted, _reach(table, gamma))
        if gamma == 1:
            np.testing.assert_allclose(block.n_accepted, token.n_accepted, atol=1e-15)
            np.testing.assert_allclose(block.tokens, token.tokens, atol=1e-15)


def _reach(table, gamma):
    """The sum over i of the expectation of w_i over drawn prefixes, by recursion."""

    def below(prefix, w):
        if len(prefix) == gamma:
            return 0.0
        p, q = table.target(prefix), table.draft(prefix)
        total = 0.0
        for v in np.flatnonzero(q):
            after = min(1.0, w * p[v] / q[v])
            total += q[v] * (after + below((*prefix, v), after))
        return total

    return below((), 1.0)


@pytest.mark.parametrize("gamma", [2, 3, 4])
def test_point_masses_gain_nothing(gamma):
    for seed in range(4):
        table = random_table(seed, vocab_size=3, depth=gamma + 1)
        drafts = point_drafts(table, gamma)
        token, block = (
            rule_law(rule, table, gamma, drafts=drafts, dtype=np.float64)
            for rule in (verify.rejection, verify.block)
        )
        np.testing.assert_allclose(block.mean_accepted, token.mean_accepted, rtol=1e-12)


def _case(batch, n_drafts, vocab, seed=0, *, n_valid=None):
    """Drafts drawn from their law, as they must be, and noise."""
    rng = np.random.default_rng(seed)
    logprobs = jax.nn.log_softmax(rng.normal(size=(batch, n_drafts, vocab)))
    tokens = np.argmax(logprobs + rng.gumbel(size=logprobs.shape), axis=-1)
    full = np.full(batch, n_drafts) if n_valid is None else n_valid
    proposal = Proposal(
        jnp.asarray(tokens, jnp.int32),
        logprobs.astype(jnp.float32),
        jnp.asarray(full, jnp.int32),
    )
    scores = jnp.asarray(rng.normal(size=(batch, n_drafts + 1, vocab)), jnp.float32)
    u = jnp.asarray(rng.random((batch, n_drafts + 1)), jnp.float32)
    return proposal, scores, UniformNoise(u[:, 1:], u[:, 0])


def _same(a, b):
    np.testing.assert_array_equal(a.n_accepted, b.n_accepted)
    np.testing.assert_array_equal(a.next_token, b.next_token)


@pytest.mark.parametrize("kind", ["drawn", "point"])
def test_one_draft_is_the_token_rule(kind):
    proposal, scores, noise = _case(5000, 1, 6)
    if kind == "point":
        proposal = proposal._replace(logprobs=None)
    block, token = (
        jax.jit(rule.verify)(proposal, scores, noise)
        for rule in (verify.block, verify.rejection)
    )
    _same(block, token)
    assert 0 < np.mean(block.n_accepted) < 1
    np.testing.assert_allclose(
        block.info["accept_prob"], token.info["accept_prob"], atol=1e-7
    )


def test_a_row_of_a_batch_ends_where_it_alone_would():
    n_valid = np.arange(60) % 5
    case = _case(60, 4, 5, n_valid=n_valid)
    run = jax.jit(verify.block.verify)
    # Cut on the host: every slice on the device would be a program of its own.
    whole, (proposal, scores, noise) = jax.tree.map(np.asarray, (run(*case), case))
    for n in range(5):
        rows = n_valid == n
        cut = proposal._replace(
            tokens=proposal.tokens[rows, :n],
            logprobs=proposal.logprobs[rows, :n],
            n_valid=proposal.n_valid[rows],
        )
        alone = run(
            cut,
            scores[rows, : n + 1],
            UniformNoise(noise.accept[rows, :n], noise.draw[rows]),
        )
        np.testing.assert_array_equal(alone.n_accepted, whole.n_accepted[rows])
        np.testing.assert_array_equal(alone.next_token, whole.next_token[rows])
        np.testing.assert_allclose(
            alone.info["test_prob"], whole.info["test_prob"][rows, :n], atol=1e-6
        )
        np.testing.assert_array_equal(whole.info["test_prob"][rows, n:], 0)


def test_a_failure_before_the_last_success_is_forgiven():
    p = np.log([[[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]]).astype(np.float32)
    q = np.log([[[0.8, 0.2], [0.2, 0.8]]]).astype(np.float32)
    proposal = Proposal(jnp.asarray([[0, 0]]), jnp.asarray(q), jnp.asarray([2]))
    for accept, n in (((0.99, 0.5), 2), ((0.0, 0.999999), 2), ((0.99, 0.999999), 2)):
        noise = UniformNoise(jnp.asarray([accept]), jnp.asarray([0.5]))
        verdict = verify.block.verify(proposal, p, noise)
        # w: 0.625, then min(1, 0.625 * 4.5) = 1; h: S = 0.3625, 0.3625 / 0.7375.
        np.testing.assert_allclose(
            verdict.info["test_prob"], [[0.3625 / 0.7375, 1.0]], rtol=1e-5
        )
        assert int(verdict.n_accepted[0]) == n
    verdict = verify.block.verify(
        proposal._replace(tokens=jnp.asarray([[0, 1]])), p, noise
    )
    assert int(verdict.n_accepted[0]) == 0


def test_weights_of_the_next_token_are_scaled_by_w():
    p = np.array([[[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]], np.float32)
    q = np.array([[[0.8, 0.2], [0.2, 0.8]]], np.float32)
    proposal = Proposal(jnp.asarray([[0, 1]]), jnp.log(q), jnp.asarray([2]))
    for accept, n, weights in (
        ((0.99, 0.99), 0, (0, 0.3)),
        ((0.1, 0.99), 1, (0.625 * 0.9 - 0.2, 0)),
        ((0.1, 0.01), 2, (0.5, 0.5)),
    ):
        noise = UniformNoise(jnp.asarray([accept]), jnp.asarray([0.25]))
        verdict = verify.block.verify(proposal, jnp.log(p), noise)
        assert int(verdict.n_accepted[0]) == n
        np.testing.assert_allclose(verdict.info["next_weights"], [weights], rtol=1e-5)
