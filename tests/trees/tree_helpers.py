"""Slow and plain versions of what the trees room computes."""

import functools
import itertools

import jax
import numpy as np
from hypothesis import strategies as st


def jitted(function, *static):
    """Compiles a function; its results are NumPy, to be looked at one by one."""
    compiled = jax.jit(function, static_argnames=static)

    @functools.wraps(function)
    def call(*args, **kwargs):
        return jax.tree.map(np.asarray, compiled(*args, **kwargs))

    call.n_compiled = compiled._cache_size
    return call


def parents_of(n_nodes):
    """Strategy: parents of a tree of so many nodes."""
    return st.tuples(*(st.integers(-1, i - 1) for i in range(n_nodes)))


def path(parents, i):
    """Nodes from the root down to node i."""
    found = []
    while i >= 0:
        found.append(i)
        i = int(parents[i])
    return found[::-1]


def ancestors(parents):
    """The mask of who attends whom, by walking up from each node."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for i in range(len(parents)):
        mask[i, path(parents, i)] = True
    return mask


def path_scores(parents, logprobs):
    """Sums along paths in float32, as a drafter adds them up."""
    scores = np.zeros(len(parents), np.float32)
    for i, parent in enumerate(parents):
        above = scores[parent] if parent >= 0 else np.float32(0)
        scores[i] = above + np.float32(logprobs[i])
    return scores


def is_closed(parents, keep):
    """Whether with each node all above it are kept."""
    return all(
        keep[parent] for i, parent in enumerate(parents) if keep[i] and parent >= 0
    )


def closed_subsets(parents):
    """All sets of nodes that are trees, bool [S, N]."""
    sets = np.array(list(itertools.product([False, True], repeat=len(parents))))
    for i, parent in enumerate(parents):
        if parent >= 0:
            sets = sets[~sets[:, i] | sets[:, parent]]
    return sets


def counted_ranks(parents):
    """Ranks of nodes among their siblings, by counting."""
    return [list(parents[:i]).count(parent) for i, parent in enumerate(parents)]


def in_order(scores, depth, ranks):
    """Numbers of nodes, the best first: the order of ties as it is written down."""
    key = lambda i: (-scores[i], depth[i], ranks[i], i)
    return sorted(range(len(scores)), key=key)


def token_paths(draft, row=()):
    """The token paths of a draft tree's nodes, in their order."""
    parents, tokens = (np.asarray(x)[row] for x in (draft.tree.parents, draft.tokens))
    n_nodes = int(np.asarray(draft.tree.n_nodes)[row])
    return [tuple(int(tokens[j]) for j in path(parents, i)) for i in range(n_nodes)]
