"""Second implementations of the tree rules, with a handle for every mistake.

They are written apart from the library's: for one row, unrolled over nodes, in the
precision of their inputs. With their defaults they are right; ``tree_mutants`` turns
one handle at a time. They take trees only.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafters import Proposal
from specjax.sampling import UniformNoise, draw
from specjax.typing import Array
from specjax.verify import Verdict, VerifyRule


def _norm(law: Array) -> Array:
    """Divides by the sum; nothing stays nothing."""
    total = law.sum(-1, keepdims=True)
    return law / jnp.where(total > 0, total, 1)


def _clamped(p: Array, q: Array) -> Array:
    return jnp.maximum(p - q, 0)


def _is(token: Array, vocab: int) -> Array:
    return jnp.arange(vocab) == token


def _rule(name: str, one: Callable[..., Verdict]) -> VerifyRule:
    """Makes a rule of what is done with one row."""
    return VerifyRule(name, False, "uniform", False, jax.vmap(one), trees="static")


def _entered(proposal: Proposal, passed: list, *, last: bool = False) -> list:
    """Whether each node is kept: of siblings that pass the first, or the last."""
    parents, kept = proposal.parents, []
    assert parents is not None
    for j in range(len(passed)):
        others = range(j + 1, len(passed)) if last else range(j)
        beaten = [passed[i] & (parents[i] == parents[j]) for i in others]
        above = [kept[i] & (parents[j] == i) for i in range(j)]
        top = parents[j] == -1
        kept.append(passed[j] & ~sum(beaten, jnp.array(False)) & sum(above, top))
    return kept


def _verdict(
    kept: list, next_law: Callable[[Array], Array], u: Array, info: dict
) -> Verdict:
    """The path of the nodes that are kept, and a token of their last row's law."""
    n = len(kept)
    nodes = jnp.sort(jnp.stack([jnp.where(k, j, n) for j, k in enumerate(kept)]))
    count = jnp.stack(kept).sum(dtype=jnp.int32)
    row = jnp.where(count > 0, nodes[count - 1] + 1, 0)
    weights = next_law(row)
    token = draw(weights[None], u[None])[0]
    path = jnp.where(nodes < n, nodes, -1).astype(jnp.int32)
    return Verdict(count, token, {**info, "next_weights": weights}, path)


def _laws(proposal: Proposal, scores: Array) -> tuple[Array, Array]:
    """Returns p and q of all rows; of point masses q is nothing."""
    p = jax.nn.softmax(scores, axis=-1)
    if proposal.logprobs is None:
        return p, jnp.zeros_like(p)
    return p, jnp.pad(jnp.exp(proposal.logprobs), ((0, 1), (0, 0)))


def _child_law(
    proposal: Proposal, s: Array, fresh: Array, x: Array, exhausted: bool = True
) -> Array:
    """What a row's next child was drawn from: s, or what is fresh, or its token x."""
    if proposal.logprobs is None:
        return x.astype(s.dtype)
    return jnp.where(s.sum() > 0, s, _norm(fresh)) if exhausted else s


def in_turn_rule(
    name: str = "in turn",
    *,
    left: Callable[..., Array] = lambda r, s: _norm(_clamped(r, s)),
    tested: Callable[..., Array] = lambda r, p: r,
    tried: Callable[..., Array] = lambda s, x: _norm(jnp.where(x, 0, s)),
    exhausted: bool = True,
    passes: Callable[..., Array] = lambda u, r, s: u * s < r,
    row: Callable[..., Array] = lambda row, up: row,
    bonus: Callable[..., Array] = lambda r, p: r,
    last: bool = False,
    backwards: bool = False,
) -> VerifyRule:
    """Makes recursive rejection, a handle for every mistake.

    Args:
      name: of the rule.
      left: (r, s) -> r after a rejection.
      tested: (r, p) -> what a child is tested against.
      tried: (s, whether a token is the child's) -> s after a rejection; s itself for
        children drawn independently.
      exhausted: whether s without weight is uniform over what was not tried.
      passes: (u, r(x), s(x)) -> whether a child passes.
      row: (last row kept, its parent's) -> the row of the next token.
      bonus: (r, p) of that row -> the law of the next token.
      last: whether the last child that passes is entered, not the first.
      backwards: whether siblings are taken in reverse, tests and entering alike.

    Returns:
      The rule; with the defaults, a second implementation of ``recursive_rejection``.
    """

    def one(proposal: Proposal, scores: Array, noise: UniformNoise) -> Verdict:
        p, s = _laws(proposal, scores)
        parents, vocab, r = proposal.parents, p.shape[-1], p
        assert parents is not None
        fresh, passed, chances = jnp.ones_like(p), [], []
        order = range(len(proposal.tokens))
        for j in reversed(order) if backwards else order:
            at, counts = parents[j] + 1, j < proposal.n_valid
            x = _is(proposal.tokens[j], vocab)
            law = _child_law(proposal, s[at], fresh[at], x, exhausted)
            r_x, s_x = ((x * y).sum() for y in (tested(r[at], p[at]), law))
            chance = jnp.where(
                r_x > 0, jnp.minimum(r_x / jnp.maximum(s_x, 1e-30), 1), 0
            )
            chances.append(jnp.where(counts, chance, 0))
            passed.append(counts & passes(noise.accept[j], r_x, s_x))
            rest = left(r[at], law)
            r = r.at[at].set(jnp.where(counts & (rest.sum() > 0), rest, r[at]))
            s = s.at[at].set(jnp.where(counts, tried(s[at], x), s[at]))
            fresh = fresh.at[at].set(jnp.where(counts & x, 0, fresh[at]))
        up = jnp.concatenate([jnp.zeros(1, jnp.int32), parents + 1])
        law_of = lambda k: bonus(r[row(k, up[k])], p[row(k, up[k])])
        if backwards:
            passed, chances = passed[::-1], chances[::-1]
        kept = _entered(proposal, passed, last=last or backwards)
        return _verdict(kept, law_of, noise.draw, {"test_prob": jnp.stack(chances)})

    return _rule(name, one)


def traversal_rule(
    name: str = "traversal",
    *,
    enter: Callable[..., Array] = lambda a, ratio: jnp.minimum(a * ratio, 1),
    left: Callable[..., Array] = lambda a, p, q: _clamped(a * p, q),
    again: Callable[..., Array] = lambda a, mass: mass / (mass + 1 - a),
    tried: Callable[..., Array] = lambda s, x: _norm(jnp.where(x, 0, s)),
    passes: Callable[..., Array] = lambda u, a: u < a,
    last: bool = False,
    bonus: Callable[..., Array] = lambda r, p: r,
) -> VerifyRule:
    """Makes traversal verification, a handle for every mistake.

    Args:
      name: of the rule.
      enter: (the parent's a, p(x)/q(x)) -> a of a child.
      left: (a, p, q) -> what a rejected child leaves of its parent's p, unnormalised.
      again: (a, its mass) -> the parent's a after that.
      tried: (q, whether a token is the child's) -> the parent's q after that.
      passes: (u, a) -> whether a node passes.
      last: whether the last branch that has a node that passes is entered.
      bonus: (current p, p) of the last row -> the law of the next token.

    Returns:
      The rule; with the defaults, a second implementation of ``traversal``.
    """

    def one(proposal: Proposal, scores: Array, noise: UniformNoise) -> Verdict:
        r, s = _laws(proposal, scores)
        p, parents, vocab = r, proposal.parents, r.shape[-1]
        assert parents is not None
        n_nodes = len(proposal.tokens)
        a, fresh = jnp.ones_like(p[:, 0]), jnp.ones_like(p)
        for j in range(n_nodes):
            at, counts = parents[j] + 1, j < proposal.n_valid
            x = _is(proposal.tokens[j], vocab)
            law = _child_law(proposal, s[at], fresh[at], x)
            of = lambda weights, x=x: jnp.where(x, weights, 0).sum()
            ratio = of(r[at]) / jnp.maximum(of(law), 1e-30)
            a = a.at[j + 1].set(jnp.where(counts, enter(a[at], ratio), 0))
            rest = left(a[at], r[at], law)
            mass = rest.sum()
            sure = (mass == 0) & (a[at] == 1)
            value = jnp.where(sure, 1, again(a[at], jnp.where(sure, 1, mass)))
            a = a.at[at].set(jnp.where(counts, value, a[at]))
            r = r.at[at].set(jnp.where(counts & (mass > 0), _norm(rest), r[at]))
            s = s.at[at].set(jnp.where(counts, tried(s[at], x), s[at]))
            fresh = fresh.at[at].set(jnp.where(counts & x, 0, fresh[at]))
        some = [passes(noise.accept[j], a[j + 1]) for j in range(n_nodes)]
        some = [x & (j < proposal.n_valid) for j, x in enumerate(some)]
        for j in reversed(range(n_nodes)):
            for i in range(j):
                some[i] |= some[j] & (parents[j] == i)
        info = {"test_prob": jnp.clip(a[1:], 0, 1)}
        kept = _entered(proposal, some, last=last)
        return _verdict(kept, lambda k: bonus(r[k], p[k]), noise.draw, info)

    return _rule(name, one)


def _least(p: Array, q: Array, k: Array) -> Array:
    """The discount of K-SEQ, found on a grid that is ever finer."""
    low, high = jnp.ones_like(k), jnp.maximum(k, 1)
    for _ in range(12):
        grid = low + (high - low) * jnp.linspace(0, 1, 17, dtype=p.dtype)
        beta = jnp.minimum(q, p / grid[:, None]).sum(-1)
        fits = 1 - (1 - beta) ** k <= grid * beta + 1e-15
        first = jnp.argmax(fits.at[-1].set(True))
        low, high = grid[jnp.maximum(first - 1, 0)], grid[first]
    return high


def k_seq_rule(
    name: str = "k-seq",
    *,
    discount: Callable[..., Array] = _least,
    left: Callable[..., Array] = lambda p, q, rho, times: (
        p - jnp.minimum(q, p / rho) * times
    ),
    count: Callable[..., Any] = lambda mine, valid: mine & valid,
) -> VerifyRule:
    """Makes K-SEQ of drawn children, a handle for every mistake.

    Args:
      name: of the rule.
      discount: (p, q, k) -> rho.
      left: (p, q, rho, (1 - (1 - beta)^k)/beta) -> the law after all are rejected.
      count: (whether a node is a row's child, whether it counts) -> what is summed up
        to k.

    Returns:
      The rule; with the defaults, a second implementation of ``k_seq``.
    """

    def one(proposal: Proposal, scores: Array, noise: UniformNoise) -> Verdict:
        p, q = _laws(proposal, scores)
        parents, n_nodes, vocab = proposal.parents, len(proposal.tokens), p.shape[-1]
        assert parents is not None
        valid = jnp.arange(n_nodes) < proposal.n_valid
        rhos, laws = [], []
        for i in range(n_nodes + 1):
            k = count(parents == i - 1, valid).sum().astype(p.dtype)
            rho = discount(p[i], q[i], k)
            beta = jnp.minimum(jnp.minimum(q[i], p[i] / rho).sum(), 1)
            times = (1 - (1 - beta) ** k) / jnp.where(beta > 0, beta, 1)
            rest = jnp.maximum(left(p[i], q[i], rho, times), 0)
            laws.append(jnp.where((k > 0) & (rest.sum() > 0), rest, p[i]))
            rhos.append(rho)
        rho, law, at = jnp.stack(rhos), jnp.stack(laws), parents + 1
        x = jax.nn.one_hot(proposal.tokens, vocab, dtype=p.dtype)
        top, under = (x * p[at]).sum(-1), (x * q[at]).sum(-1) * rho[at]
        passed = list(valid & (noise.accept * under < top))
        chance = jnp.where(top > 0, jnp.minimum(top / jnp.maximum(under, 1e-30), 1), 0)
        info = {"test_prob": jnp.where(valid, chance, 0)}
        kept = _entered(proposal, passed)
        return _verdict(kept, lambda k: law[k], noise.draw, info)

    return _rule(name, one)


def descend_rule(
    name: str = "descend",
    *,
    again: bool = False,
    each: bool = False,
    bonus: Callable[..., Array] = lambda row, up: row,
) -> VerifyRule:
    """Makes the sampled match down a tree, a handle for every mistake.

    Args:
      name: of the rule.
      again: whether the token after a mismatch is drawn once more.
      each: whether every child is compared with a draw of its own.
      bonus: (last row kept, its parent's) -> the row of the next token.

    Returns:
      The rule; with the defaults, a second one of ``sample_and_match``.
    """

    def one(proposal: Proposal, scores: Array, noise: UniformNoise) -> Verdict:
        p, parents = jax.nn.softmax(scores, axis=-1), proposal.parents
        assert parents is not None
        n_nodes = len(proposal.tokens)
        valid = jnp.arange(n_nodes) < proposal.n_valid
        # The number of a row's first child, or the pass's own.
        u = jnp.broadcast_to(noise.draw, n_nodes + 1)
        for j in reversed(range(n_nodes)):
            at = parents[j] + 1
            u = u.at[at].set(jnp.where(valid[j], noise.accept[j], u[at]))
        at = parents + 1
        drawn, own = draw(p, u), draw(p[at], noise.accept)
        passed = list(valid & (proposal.tokens == (own if each else drawn[at])))
        kept = _entered(proposal, passed)
        inner = jnp.stack([((at == k) & valid).any() for k in range(n_nodes + 1)])
        point = jax.nn.one_hot(drawn, p.shape[-1], dtype=p.dtype)
        up = jnp.concatenate([jnp.zeros(1, jnp.int32), at])

        def law(k: Array) -> Array:
            k = bonus(k, up[k])
            return jnp.where(inner[k] & (not again), point[k], p[k])

        return _verdict(kept, law, noise.draw, {"row_weights": p[at]})

    return _rule(name, one)
