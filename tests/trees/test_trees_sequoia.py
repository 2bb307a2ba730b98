"""Trees of the most expected tokens, and the size that is fastest."""

import numpy as np
import pytest
import tree_helpers
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.theory import best_gamma, expected_tokens_per_pass
from specjax.trees import (
    Topology,
    best_first,
    best_size,
    chain,
    expected_tokens,
    k_ary,
    sequoia,
)

# Geometric acceptance of eight ranks, and F of the best trees by rows, root included.
GEOMETRIC = 0.7 * 0.3 ** np.arange(8)
ROWS = (1, 2, 4, 8, 16, 32)
UNLIMITED = (1, 1.7, 2.533, 3.2982, 4.0979, 4.8933)
DEPTH_3 = (1, 1.7, 2.533, 3.1399, 3.6027, 3.8629)


@pytest.mark.parametrize("build", [sequoia, best_first])
@pytest.mark.parametrize(("depth", "values"), [(None, UNLIMITED), (3, DEPTH_3)])
def test_published_values(build, depth, values):
    for rows, expected in zip(ROWS, values, strict=True):
        tree = build(GEOMETRIC, rows - 1, depth)
        assert tree.n_nodes == rows - 1
        assert depth is None or tree.max_depth <= depth
        assert expected_tokens(tree, GEOMETRIC) == pytest.approx(expected, abs=1e-4)


def test_published_values_are_of_the_best_trees_only():
    """A balanced tree of as many nodes falls short by more than the tolerance."""
    assert expected_tokens(k_ary(2, 2), GEOMETRIC) < UNLIMITED[3] - 1e-3
    assert expected_tokens(chain(7), GEOMETRIC) < UNLIMITED[3] - 1e-3


@st.composite
def _accept(draw, falling):
    shares = draw(
        st.lists(st.integers(0 if not falling else 1, 8), min_size=2, max_size=4)
    )
    # One share is of no child being accepted.
    accept = np.array(shares[1:]) / max(sum(shares), 1)
    return np.sort(accept)[::-1] if falling else accept


@settings(max_examples=80, deadline=None)
@given(_accept(falling=True), st.integers(0, 24), st.integers(4, 30))
def test_programme_and_heap_agree(accept, n_nodes, depth):
    for limit in (None, depth if accept.size > 1 else None):
        if limit and n_nodes > sum(accept.size**d for d in range(1, limit + 1)):
            continue
        exact, greedy = (f(accept, n_nodes, limit) for f in (sequoia, best_first))
        assert expected_tokens(exact, accept) == pytest.approx(
            expected_tokens(greedy, accept), abs=1e-9
        )
        # Ties: shallower, then of lower rank.
        if GEOMETRIC[0] ** n_nodes > 1e-3:
            assert sum(exact.depth) == sum(greedy.depth)
            assert sum(exact.ranks) == sum(greedy.ranks)


@settings(max_examples=40, deadline=None)
@given(_accept(falling=False), st.integers(0, 8), st.sampled_from([2, 3]))
def test_programme_is_optimal_for_any_acceptance(accept, n_nodes, depth):
    """Against all trees whose children are the first draws of their parents."""
    shape = k_ary(min(accept.size, 2), depth if accept.size > 1 else 8)
    accept = accept[:2]
    if n_nodes > shape.n_nodes:
        return
    sets = _rank_closed(shape)
    sets = sets[sets.sum(1) == n_nodes]
    reach = [np.prod(accept[list(path)]) for path in shape.rank_paths]
    best = 1 + (sets @ np.array(reach)).max(initial=0)
    tree = sequoia(accept, n_nodes, shape.max_depth)
    assert expected_tokens(tree, accept) == pytest.approx(best, abs=1e-9)
    assert not tree.has_gaps and tree.max_depth <= shape.max_depth


_SETS: dict[Topology, np.ndarray] = {}


def _rank_closed(shape):
    if shape not in _SETS:
        sets = tree_helpers.closed_subsets(shape.parents)
        for i, (parent, rank) in enumerate(
            zip(shape.parents, shape.ranks, strict=True)
        ):
            for j in range(i):
                if (shape.parents[j], shape.ranks[j]) == (parent, rank - 1):
                    sets = sets[~sets[:, i] | sets[:, j]]
        _SETS[shape] = sets
    return _SETS[shape]


def test_acceptance_that_grows_with_the_rank_needs_the_programme():
    accept = [0.1, 0.6]
    tree = sequoia(accept, 4)
    assert tree.rank_paths == ((0,), (1,), (1, 0), (1, 1))
    assert expected_tokens(tree, accept) == pytest.approx(1 + 0.7 + 0.6 * 0.7)
    # The four likeliest nodes alone, (1,), (1, 1), ..., are no tree of first draws.
    with pytest.raises(
        ValueError, match="grows from 0.1 to 0.6 at rank 1; use sequoia"
    ):
        best_first(accept, 4)


@pytest.mark.parametrize("build", [sequoia, best_first])
def test_ties_are_shallow_first_then_of_low_rank(build):
    # 1/4 is the second child, and the first child of the first one.
    assert build([0.5, 0.25], 2).rank_paths == ((0,), (1,))
    # At depth 2, 1/8 is (0, 1) and (1, 0); at depth 3 it is (0, 0, 0).
    assert build([0.5, 0.25], 4).rank_paths == ((0,), (1,), (0, 0), (1, 0))
    assert build([0.5, 0.25], 5).rank_paths[-1] == (1, 0)
    # A tie in spite of rounding: 0.1 * 0.1 is a little more than 0.01.
    assert 0.1 * 0.1 > 0.01
    assert build([0.1, 0.01], 2).rank_paths == ((0,), (1,))


@pytest.mark.parametrize("build", [sequoia, best_first])
def test_one_child_gives_the_chain(build):
    assert build([0.8], 6) == chain(6)
    assert build([1.0], 3) == chain(3)
    assert build([0.0, 0.0], 2).n_nodes == 2


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.integers(0, 12))
def test_a_chain_expects_what_theory_says(alpha, gamma):
    theirs = expected_tokens_per_pass(alpha, gamma)
    assert expected_tokens(chain(gamma), [alpha]) == pytest.approx(theirs, rel=1e-12)


def test_a_gap_is_no_child():
    tree = Topology((-1, 0), (1, 0))
    assert expected_tokens(tree, [0.5, 0.25]) == pytest.approx(1 + 0.25 * 1.5)


def test_the_fastest_size_equals_a_search_of_everything():
    rng = np.random.default_rng(0)
    for _ in range(10):
        accept = np.sort(rng.dirichlet(np.ones(4))[:3])[::-1]
        times = 1 + np.cumsum(rng.uniform(0, 0.2, 13))
        draft_s = rng.uniform(0, 0.2)
        found = best_size(accept, times, draft_s)
        options = []
        for n in range(13):
            for d in range(13):
                if n <= sum(3**level for level in range(1, d + 1)):
                    tokens = expected_tokens(sequoia(accept, n, d), accept)
                    options.append(((d * draft_s + times[n]) / tokens, n, d))
        best = min(options)
        assert found.time_per_token_s == pytest.approx(best[0])
        assert found.topology.n_nodes == best[1]
        assert found.topology.max_depth <= best[2]
        tokens = expected_tokens(found.topology, accept)
        assert found.expected_tokens == pytest.approx(tokens)
        assert found.pass_s / tokens == pytest.approx(found.time_per_token_s)


def test_the_fastest_chain_equals_theory():
    """One rank: sizes are draft lengths, and a level costs c of a plain step."""
    for alpha, c in ((0.7, 0.1), (0.8, 0.05), (0.3, 0.5)):
        best = best_gamma(alpha, c, max_gamma=30)
        found = best_size([alpha], np.ones(31), c)
        assert found.topology == chain(best.gamma)
        assert 1 / found.time_per_token_s == pytest.approx(best.speedup)


def test_sizes_are_measured_ones():
    staircase = lambda n: 1.0 if n < 32 else 2.0
    found = best_size(GEOMETRIC, staircase, 0.0, sizes=(0, 15, 31, 63))
    assert found.topology.n_nodes == 31
    assert found.expected_tokens == pytest.approx(UNLIMITED[-1], abs=1e-4)
    shallow = best_size(GEOMETRIC, staircase, 0.0, sizes=(0, 15, 31, 63), max_depth=3)
    assert shallow.expected_tokens == pytest.approx(DEPTH_3[-1], abs=1e-4)
    none = best_size([0.01], [1.0, 2.0, 3.0], 0.1)
    assert none.topology == chain(0) and none.time_per_token_s == 1


ERRORS = [
    (
        lambda: expected_tokens(k_ary(3, 1), [0.5]),
        "rank 2 but .* has 1 entries; measure",
    ),
    (lambda: sequoia([], 3), r"has shape \(0,\) where \[K\] with K >= 1 is needed"),
    (lambda: sequoia(0.5, 3), r"has shape \(\) where"),
    (lambda: sequoia(["a"], 3), "is no list of numbers"),
    (lambda: sequoia([0.5, -0.1], 3), r"\[1\]=-0.1 must be in \[0, 1\]"),
    (lambda: sequoia([np.nan], 3), r"\[0\]=nan must be in"),
    (lambda: sequoia([0.7, 0.7], 3), "sums to 1.4, more than 1.*must be multiplied"),
    (lambda: sequoia([0.5], -1), "n_nodes=-1 must be a whole number >= 0"),
    (lambda: best_first([0.5], 2.5), "n_nodes=2.5 must be a whole number"),
    (lambda: sequoia([0.5], 3, -1), "max_depth=-1 must be a whole number >= 0"),
    (
        lambda: sequoia([0.5, 0.2], 7, 2),
        "n_nodes=7 do not fit: with 2 ranks and max_depth=2 .* has at most 6; lower",
    ),
    (lambda: best_first([0.5], 3, 2), "has at most 2; lower n_nodes"),
    (lambda: best_size([0.5], lambda n: 1.0, 0), "is a function, so sizes must say"),
    (lambda: best_size([0.5], 1.0, 0), r"t_target_s has shape \(\); give a list"),
    (
        lambda: best_size([0.5], [1, 0], 0),
        "t_target_s of 1 nodes=0 must be finite and >",
    ),
    (lambda: best_size([0.5], [1, np.nan], 0), "t_target_s of 1 nodes=nan must be"),
    (lambda: best_size([0.5], [1, 1], -1), "t_draft_s=-1 must be finite and >= 0"),
    (lambda: best_size([0.5], [1], 0, sizes=[]), r"sizes=\[\] is empty; name"),
    (lambda: best_size([0.5], [1, 2], 0, sizes=[2]), "sizes has 2 but .* ends at 1"),
    (
        lambda: best_size([0.5], [1, 2, 3], 0, sizes=[2], max_depth=1),
        r"no tree of sizes=\[2\] fits 1 ranks and max_depth=1; add smaller sizes",
    ),
    (lambda: best_size([0.5], [1], 0, max_depth=-1), "max_depth=-1 must be"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS)
def test_errors_name_the_value_and_the_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()
