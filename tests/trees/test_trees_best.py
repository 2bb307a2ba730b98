"""The best n of scored candidates: optimal, closed, ties, batches and budgets."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_helpers
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.testing import topology
from specjax.trees import best_n, check_tree, keep_best, share_budget, take_nodes

C = 9
N = 5

BEST = tree_helpers.jitted(best_n, "n", "max_depth")
KEEP = tree_helpers.jitted(keep_best, "max_depth")
SHARE = tree_helpers.jitted(share_budget)

# Conditional probabilities with many ties: a certain child ties with its parent, two
# halves with a quarter.
CONDITIONAL = st.sampled_from([1.0, 1.0, 0.5, 0.25, 0.3, 0.0])


@st.composite
def _instance(draw, conditional=CONDITIONAL):
    parents = draw(tree_helpers.parents_of(C))
    with np.errstate(divide="ignore"):
        logprobs = np.log(draw(st.tuples(*[conditional] * C)))
    return parents, tree_helpers.path_scores(parents, logprobs)


def _expected(parents, scores, n):
    """Which candidates the written order keeps."""
    depth = [len(tree_helpers.path(parents, i)) for i in range(C)]
    order = tree_helpers.in_order(scores, depth, tree_helpers.counted_ranks(parents))
    chosen = [i for i in order if scores[i] > -np.inf][:n]
    return np.isin(np.arange(C), chosen)


def _is_best(parents, scores, keep, n):
    """Whether no tree of at most n candidates expects more accepted drafts."""
    sets = tree_helpers.closed_subsets(parents)
    sets = sets[sets.sum(1) <= n]
    reach = np.exp(scores.astype(np.float64))
    return reach[keep].sum() >= (sets @ reach).max() - 1e-6


@settings(max_examples=150, deadline=None)
@given(_instance(), st.integers(0, N))
def test_what_is_kept_is_a_tree_and_optimal(instance, n):
    parents, scores = instance
    ranks = tree_helpers.counted_ranks(parents)
    keep = KEEP(scores, np.array(parents), n, ranks=np.array(ranks))
    assert tree_helpers.is_closed(parents, keep)
    assert _is_best(parents, scores, keep, n)
    assert np.array_equal(keep, _expected(parents, scores, n))


def test_the_checks_above_can_fail():
    """The first n, the n best deeper ones first, and n - 1 nodes are all caught."""
    rng = np.random.default_rng(0)
    caught = dict.fromkeys(("first", "deep", "fewer"), 0)
    for _ in range(40):
        parents = [int(rng.integers(-1, i)) if i else -1 for i in range(C)]
        logprobs = np.log(rng.choice([1.0, 0.5, 0.3], C))
        scores = tree_helpers.path_scores(parents, logprobs)
        first = np.arange(C) < N
        caught["first"] += not _is_best(parents, scores, first, N)
        depth = [len(tree_helpers.path(parents, i)) for i in range(C)]
        deep = np.isin(np.arange(C), np.lexsort((-np.array(depth), -scores))[:N])
        caught["deep"] += not tree_helpers.is_closed(parents, deep)
        fewer = _expected(parents, scores, N - 1)
        caught["fewer"] += not _is_best(parents, scores, fewer, N)
    assert min(caught.values()) >= 5, caught


def test_ties_go_to_the_shallower_then_to_the_lower_rank_then_to_the_lower_number():
    parents = np.array([-1, 0, 0, -1, 3, 4, 0, 3, 7])
    scores = np.log(np.array([0.5, 0.25, 0.25, 0.5, 0.25, 0.25, 0.1, 0.25, 0.25]))
    ranks = np.array(tree_helpers.counted_ranks(parents))
    order = [0, 3, 1, 4, 2, 7, 5, 8, 6]
    for n in range(C + 1):
        keep = KEEP(scores, parents, n, ranks=ranks)
        assert np.flatnonzero(keep).tolist() == sorted(order[:n])


@settings(max_examples=60, deadline=None)
@given(_instance(st.floats(0, 4)), st.data())
def test_what_is_kept_is_a_tree_whatever_the_scores(instance, data):
    """Also where a child outscores its parent, or has no number."""
    parents, scores = instance
    holes = data.draw(st.tuples(*[st.sampled_from([0.0, 0.0, np.nan])] * C))
    keep = KEEP(scores + np.array(holes, np.float32), np.array(parents), N)
    assert tree_helpers.is_closed(parents, keep)
    assert not np.any(keep & np.isnan(holes))


@settings(max_examples=40, deadline=None)
@given(st.lists(_instance(), min_size=3, max_size=3), st.data())
def test_kept_nodes_are_renumbered(instances, data):
    """Rows of a batch, with a limit each and candidates that do not count."""
    parents = np.array([instance[0] for instance in instances])
    scores = np.stack([instance[1] for instance in instances])
    limit = data.draw(st.tuples(*[st.integers(0, N + 1)] * 3))
    valid = np.array(data.draw(st.tuples(*[st.tuples(*[st.booleans()] * C)] * 3)))
    found = BEST(scores, parents, n=N, valid=valid, limit=np.array(limit))
    check_tree(found.tree)
    for row in range(3):
        n_nodes = int(found.tree.n_nodes[row])
        index = np.array(found.index[row])
        kept = np.array(
            KEEP(scores[row], parents[row], min(limit[row], N), valid=valid[row])
        )
        assert index[:n_nodes].tolist() == np.flatnonzero(kept).tolist()
        assert not index[n_nodes:].any()
        assert np.all(valid[row][index[:n_nodes]])
        for node in range(n_nodes):
            mine, candidate = int(found.tree.parents[row, node]), index[node]
            above = parents[row, candidate]
            assert above == (index[mine] if mine >= 0 else -1)
            assert found.scores[row, node] == scores[row, candidate]
        assert np.all(np.array(found.scores[row, n_nodes:]) == -np.inf)


def test_more_room_than_candidates():
    found = BEST(jnp.log(jnp.array([0.5, 0.25])), jnp.array([-1, 0]), n=4)
    assert found.tree.parents.tolist() == [-1, 0, -1, -1]
    assert found.tree.depth.tolist() == [1, 2, 0, 0]
    assert found.tree.n_nodes == 2


def test_probabilities_do_as_well_as_their_logs():
    scores, parents = jnp.linspace(0.9, 0.1, C), jnp.array(topology.chain(C))
    by_log = KEEP(jnp.log(scores), parents, N)
    assert np.array_equal(KEEP(scores, parents, N), by_log) and by_log.sum() == N


def test_another_budget_of_rows_compiles_nothing():
    scores, parents = jnp.zeros((2, C)), jnp.full((C,), -1)
    KEEP(scores, parents, jnp.array([1, 2]))
    before = KEEP.n_compiled()
    kept = KEEP(scores - 1, parents, jnp.array([4, 0]))
    assert kept.sum(1).tolist() == [4, 0] and KEEP.n_compiled() == before


def test_take_nodes_keeps_the_order_of_candidates():
    keep = jnp.array([False, True, False, True, True])
    tree, index = take_nodes(keep, jnp.array([-1, -1, 0, 1, 3]), 4)
    assert index.tolist() == [1, 3, 4, 0]
    assert tree.parents.tolist() == [-1, 0, 1, -1]
    assert tree.depth.tolist() == [1, 2, 3, 0]


# Several requests


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[CONDITIONAL] * 3), min_size=3, max_size=3),
    st.integers(0, 9),
    st.tuples(*[st.integers(0, 3)] * 3),
)
def test_a_budget_over_chains(conditional, budget, n_valid):
    survival = np.cumprod(np.array(conditional, np.float32), axis=1)
    counts = SHARE(survival, budget, np.array(n_valid))
    assert counts.sum() == min(budget, sum(n_valid)) and np.all(counts <= n_valid)
    gains = np.concatenate([np.zeros((3, 1)), survival.cumsum(1)], axis=1)
    best = max(
        sum(gains[row, n] for row, n in enumerate(choice))
        for choice in itertools.product(*(range(n + 1) for n in n_valid))
        if sum(choice) <= budget
    )
    assert gains[np.arange(3), counts].sum() == pytest.approx(best, abs=1e-6)
    # Ties: the earlier position, then the lower row.
    cells = [(-survival[r, j], j, r) for r in range(3) for j in range(n_valid[r])]
    kept = sorted(cells)[:budget]
    assert counts.tolist() == [sum(r == row for _, _, r in kept) for row in range(3)]


def test_a_budget_over_logs_and_over_trees():
    survival = jnp.array([[0.9, 0.5, 0.1], [0.8, 0.6, 0.2]])
    assert SHARE(survival, 3).tolist() == [1, 2]
    assert SHARE(jnp.log(survival), 3).tolist() == [1, 2]
    # Two requests with a tree each, side by side.
    parents = jnp.array([-1, 0, 0, -1, 3, 3])
    scores = jnp.log(jnp.array([0.9, 0.4, 0.5, 0.6, 0.55, 0.01]))
    keep = KEEP(scores, parents, 4)
    assert keep.tolist() == [True, False, True, True, True, False]


def _law(p, q, n_valid):
    """Law of a request's next two tokens under rejection sampling of two drafts.

    Args:
      p: target laws, the first token's [2] and the second's [2, 2].
      q: draft laws, likewise.
      n_valid: drafts verified, by drafts, [2, 2].
    """
    out = np.zeros((2, 2))
    rest = lambda p, q: np.maximum(p - q, 0) / max(np.maximum(p - q, 0).sum(), 1e-300)
    accept = lambda p, q, x: min(1.0, p[x] / q[x])
    for x, y in itertools.product(range(2), repeat=2):
        chance = q[0][x] * q[1][x, y]
        if n_valid[x, y] == 0:
            out += chance * p[0][:, None] * p[1]
            continue
        a = accept(p[0], q[0], x)
        out += chance * (1 - a) * rest(p[0], q[0])[:, None] * p[1]
        if n_valid[x, y] == 1:
            out[x] += chance * a * p[1][x]
            continue
        b = accept(p[1][x], q[1][x], y)
        out[x, y] += chance * a * b
        out[x] += chance * a * (1 - b) * rest(p[1][x], q[1][x])
    return out


def _problem(rng):
    """Two requests: laws, and survival by drafts, [2, 2 ** 4 drafts, 2 positions]."""
    laws = [
        [(rng.dirichlet([1, 1]), rng.dirichlet([1, 1], 2)) for _ in "pq"] for _ in "rs"
    ]
    drafts = np.array(list(itertools.product(range(2), repeat=4)))
    confidence = rng.uniform([0.6, 0, 0], 1, (2, 3))
    survival = np.stack(
        [
            np.stack([np.full(16, c[0]), c[0] * c[1 + drafts[:, 2 * r]]], axis=-1)
            for r, c in enumerate(confidence)
        ]
    )
    return laws, drafts, survival


def _bias(laws, drafts, n_valid):
    """Total variation between the first request's law and its target's.

    Args:
      laws: (p, q) of the two requests.
      drafts: of both, [16, 4].
      n_valid: of the first request for each of them, [16].
    """
    (p, q), (_, other) = laws
    law = 0
    for z in itertools.product(range(2), repeat=2):
        mine = n_valid[np.all(drafts[:, 2:] == z, axis=1)].reshape(2, 2)
        law += other[0][z[0]] * other[1][z] * _law(p, q, mine)
    return 0.5 * np.abs(law - p[0][:, None] * p[1]).sum()


def test_a_fixed_budget_is_exact_for_sampled_drafts():
    """And one that is chosen by looking at the survivals is not."""
    rng = np.random.default_rng(1)
    # A staircase: once a wider pass is paid for, all of it is free.
    steps_per_s = np.array([1, 0.5, 0.5, 0.5, 0.5])
    share = tree_helpers.jitted(jax.vmap(share_budget, (1, 0)))
    peeking = []
    for _ in range(40):
        laws, drafts, survival = _problem(rng)
        for budget in range(5):
            n_valid = share(survival, np.full(16, budget))
            assert _bias(laws, drafts, n_valid[:, 0]) < 1e-12
        ordered = -np.sort(-survival.transpose(1, 0, 2).reshape(16, 4), axis=1)
        gains = np.concatenate([np.zeros((16, 1)), ordered.cumsum(1)], axis=1)
        chosen = ((2 + gains) * steps_per_s).argmax(1)
        n_valid = share(survival, chosen)
        peeking.append(_bias(laws, drafts, n_valid[:, 0]))
    assert max(peeking) > 0.01


def test_published_counterexample_of_a_budget_that_looks():
    """One request, drafts verified only where the whole looks worth it."""
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    second = np.full((2, 2), 0.5)
    steps_per_s = np.array([1, 0.5, 0.45])
    survival = np.array([[0.8, 0.72], [0.8, 0.0]])
    tokens = 1 + np.concatenate([np.zeros((2, 1)), survival.cumsum(1)], axis=1)
    throughput = tokens * steps_per_s
    assert throughput[0, 2] == pytest.approx(1.134)
    looking = throughput.argmax(1)
    biased = _law((p, second), (q, second), np.stack([looking] * 2, axis=1)).sum(1)
    assert biased == pytest.approx([0.85, 0.15])
    for budget in range(3):
        fixed = np.array([SHARE(jnp.array(s[None]), budget)[0] for s in survival])
        law = _law((p, second), (q, second), np.stack([fixed] * 2, axis=1)).sum(1)
        assert law == pytest.approx([0.7, 0.3])


def test_chains_are_the_trees_of_one_branch():
    """A row's share of the budget is what best_n keeps of it."""
    survival = jnp.array([0.9, 0.8, 0.7, 0.1])
    found = BEST(jnp.log(survival), jnp.array(topology.chain(4)), n=3)
    assert found.tree.parents.tolist() == list(topology.chain(3))
    assert SHARE(survival[None], 3).tolist() == [3]
