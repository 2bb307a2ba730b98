"""Trees grown level by level, and from one law a depth."""

import heapq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_helpers

from specjax.trees import (
    Children,
    best_first,
    best_n_marginals,
    check_tree,
    expand,
    expected_tokens,
    from_paths,
    rerank,
    top_children,
)

VOCAB, STATES = 5, 64

MARGINALS = tree_helpers.jitted(best_n_marginals, "n", "width")


def _table(seed, ties):
    """Next-token log-probabilities of a drafter by its state, [STATES, VOCAB]."""
    rng = np.random.default_rng(seed)
    if ties:
        laws = np.array([[0.5, 0.25, 0.125, 0.125, 0], [0.25, 0.25, 0.25, 0.25, 0]])
        laws = rng.permuted(laws[rng.integers(0, 2, STATES)], axis=1)
    else:
        laws = rng.dirichlet(np.full(VOCAB, 0.5), STATES)
    with np.errstate(divide="ignore"):
        return np.log(laws).astype(np.float32)


def _hash(state, token):
    """A state that depends on the whole path."""
    return (state * 7 + token + 1) % STATES


def _grow_tree(table, start, *, width, beam, depth, n):
    """The library's tree where a row's drafter starts in state ``start``.

    Returns:
      The draft tree, and whether each grown node attended the tokens of its path and
      nothing else.
    """

    def children(carry, frontier):
        states, sums, rows, good = carry
        above = lambda x: jnp.take_along_axis(x, frontier.parent, axis=1)
        states = _hash(above(states), frontier.tokens)
        sums = above(sums) + frontier.tokens + 1
        at = (frontier.level - 1) * beam
        rows = jax.lax.dynamic_update_slice_in_dim(rows, frontier.tokens + 1, at, 1)
        attended = jnp.sum(jnp.where(frontier.attends, rows[:, None, :], 0), axis=-1)
        same = attended == sums
        same &= jnp.sum(frontier.attends, axis=-1) == frontier.level
        good &= jnp.all(same | (frontier.scores == -jnp.inf))
        return top_children(table[states], width), (states, sums, rows, good)

    batch = start.shape[0]
    carry = (
        jnp.tile(start[:, None], (1, beam)),
        jnp.zeros((batch, beam), jnp.int32),
        jnp.zeros((batch, (depth - 1) * beam), jnp.int32),
        jnp.bool_(True),
    )
    root = top_children(table[start][:, None], width)
    candidates, carry = expand(root, children, carry, beam=beam, depth=depth)
    return rerank(candidates, n, max_depth=depth), carry[-1]


_grow = tree_helpers.jitted(_grow_tree, "width", "beam", "depth", "n")


def _reference(table, start, *, width, beam, depth, n):
    """EAGLE-2 with lists: paths with scores, the best n of all that were looked at."""
    best = lambda nodes, k: sorted(nodes, key=lambda node: node[:4])[:k]
    seen, frontier = [], [(0.0, 0, (), (), start)]
    for level in range(1, depth + 1):
        found = []
        for slot, (cost, _, _, path, state) in enumerate(frontier):
            order = np.argsort(-table[state], kind="stable")[:width]
            for rank, token in enumerate(order):
                score = np.float32(-cost) + table[state][token]
                node = (-score, level, (int(rank), slot), (*path, int(token)))
                found.append((*node, _hash(state, int(token))))
        found = [node for node in found if node[0] < np.inf]
        seen += [
            (c, l, r[0], len(seen) + i, p) for i, (c, l, r, p, _) in enumerate(found)
        ]
        kept = best(found, beam)
        frontier = [node for node in found if node in kept]
    return [node[4] for node in best(seen, n)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        dict(width=3, beam=3, depth=4, n=10),
        # More nodes than the first level has, and a budget of more than there are.
        dict(width=2, beam=4, depth=3, n=30),
        dict(width=4, beam=2, depth=1, n=3),
    ],
)
def test_expand_and_rerank_equal_lists(shape, ties):
    start = jnp.arange(4)
    for seed in range(6):
        table = _table(seed, ties)
        draft, attended = _grow(table, start, **shape)
        check_tree(draft.tree, draft.tokens)
        assert attended
        for row in range(4):
            paths = tree_helpers.token_paths(draft, row)
            expected = _reference(table, int(start[row]), **shape)
            assert sorted(paths) == sorted(expected)


def test_lists_of_another_beam_differ():
    """The comparison above can fail."""
    table, n_other = _table(0, False), 0
    for start in range(20):
        narrow = _reference(table, start, width=3, beam=1, depth=4, n=10)
        wide = _reference(table, start, width=3, beam=3, depth=4, n=10)
        n_other += sorted(narrow) != sorted(wide)
    assert n_other > 10


@pytest.mark.parametrize("ties", [False, True])
def test_a_beam_of_n_loses_nothing(ties):
    """The tree is that of the n likeliest of all prefixes."""
    shape = dict(width=VOCAB, beam=7, depth=3, n=7)
    for seed in range(6):
        table = _table(seed, ties)
        draft, _ = _grow(table, jnp.arange(4), **shape)
        for row in range(4):
            everything = _reference(table, row, width=VOCAB, beam=10**6, depth=3, n=7)
            assert sorted(tree_helpers.token_paths(draft, row)) == sorted(everything)


def test_scores_and_ranks_go_with_the_nodes():
    table = _table(3, False)
    draft, _ = _grow(table, jnp.arange(4), width=3, beam=3, depth=4, n=10)
    for i, path in enumerate(tree_helpers.token_paths(draft, 3)):
        state, score = 3, np.float32(0)
        for token in path:
            order = list(np.argsort(-table[state], kind="stable"))
            score, rank = score + table[state][token], order.index(token)
            state = _hash(state, token)
        assert draft.scores[3, i] == score and draft.ranks[3, i] == rank


def test_a_child_never_outscores_its_parent():
    """Scores above 0, which are no log-probabilities, and nan."""
    root = Children(jnp.array([[[3, 4, 5]]]), jnp.array([[[2.0, -1.0, jnp.nan]]]))
    step = lambda state, frontier: (
        Children(
            jnp.broadcast_to(jnp.array([1, 2]), (1, 2, 2)),
            jnp.broadcast_to(jnp.array([1.0, -0.5]), (1, 2, 2)),
        ),
        state,
    )
    grow = lambda root: rerank(expand(root, step, None, beam=2, depth=3)[0], 20)
    draft = tree_helpers.jitted(grow)(root)
    check_tree(draft.tree, draft.tokens)
    assert 5 not in [path[0] for path in tree_helpers.token_paths(draft, 0)]
    parents = np.array(draft.tree.parents[0])
    scores = np.array(draft.scores[0])
    for i in range(int(draft.tree.n_nodes[0])):
        assert scores[i] <= (scores[parents[i]] if parents[i] >= 0 else 0)


def _heap(logprobs, n, width):
    """Best first over one law a depth, DDTree's form: paths of (rank, token)."""
    depth = len(logprobs)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, :width]
    found, heap = [], []

    def push(ranks):
        score = np.float32(0)
        for level, rank in enumerate(ranks):
            score = score + logprobs[level, order[level, rank]]
        heapq.heappush(heap, (-score, len(ranks), ranks[-1], ranks))

    push((0,))
    while heap and len(found) < n:
        cost, _, _, ranks = heapq.heappop(heap)
        if cost < np.inf:
            found.append(tuple(int(order[d, r]) for d, r in enumerate(ranks)))
        if len(ranks) < depth:
            push((*ranks, 0))
        if ranks[-1] + 1 < order.shape[1]:
            push((*ranks[:-1], ranks[-1] + 1))
    return found


def _laws(seed, ties=False):
    """Laws of four depths for three rows, [3, 4, VOCAB]."""
    return np.stack([_table(seed + row, ties)[:4] for row in range(3)])


@pytest.mark.parametrize(("n", "width"), [(12, None), (40, 2)])
def test_marginals_equal_best_first(n, width):
    for seed in range(6):
        logprobs = _laws(2 * seed, seed % 2)
        draft = MARGINALS(logprobs, n=n, width=width, limit=np.full(3, n))
        check_tree(draft.tree, draft.tokens)
        for row in range(3):
            expected = _heap(
                logprobs[row], n, min(n, VOCAB) if width is None else width
            )
            assert sorted(tree_helpers.token_paths(draft, row)) == sorted(expected)


def test_marginals_of_one_law_are_sequoias():
    accept = np.array([0.6, 0.2, 0.1, 0.1])
    logprobs = jnp.log(jnp.array(np.tile(accept, (9, 1))))
    draft = MARGINALS(logprobs, n=16)
    ranks = np.array(draft.ranks)
    paths = [
        [int(ranks[j]) for j in tree_helpers.path(np.array(draft.tree.parents), i)]
        for i in range(16)
    ]
    mine = expected_tokens(from_paths(paths), accept)
    best = expected_tokens(best_first(accept, 16), accept)
    assert mine == pytest.approx(best, abs=1e-6)
    assert np.exp(np.array(draft.scores)).sum() == pytest.approx(best - 1, abs=1e-5)


def test_a_row_depends_on_no_other_and_keeps_to_its_limit():
    logprobs, limit = _laws(0), np.array([2, 15, 0])
    first = MARGINALS(logprobs, n=12, width=None, limit=limit)
    assert first.tree.n_nodes.tolist() == [2, 12, 0]
    others = np.stack([_laws(5)[0], _laws(6)[0], logprobs[1]])
    second = MARGINALS(others, n=12, width=None, limit=np.array([7, 1, 15]))
    for mine, theirs in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        assert np.array_equal(mine[1], theirs[2])


def test_errors_name_the_value_and_the_remedy():
    logprobs = jnp.zeros((2, 3))
    for make, message in [
        (lambda: top_children(logprobs, 4), "width=4 exceeds the 3 tokens there are"),
        (lambda: top_children(logprobs, 0), "width=0 must be a whole number >= 1"),
        (lambda: best_n_marginals(logprobs, 0), "n=0 must be a whole number >= 1"),
        (lambda: _expand(beam=0), "beam=0 must be a whole number >= 1"),
        (lambda: _expand(depth=0), "depth=0 must be a whole number >= 1"),
        (lambda: _expand(nodes=2), "root has children of 2 nodes.*pending token alone"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def _expand(nodes=1, beam=2, depth=2):
    root = top_children(jnp.zeros((1, nodes, 3)), 2)
    return expand(
        root, lambda state, frontier: (root, state), None, beam=beam, depth=depth
    )
