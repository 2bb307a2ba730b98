"""Draft trees: their shapes, what a pass over them attends, and which are best.

A tree's nodes are draft tokens; its root is the pending token, which is no node. A
target pass has the rows [pending token, node 0, node 1, ...]. Parents come before
children; siblings of a static tree stand in draft order.

- static trees: ``Topology``, built by ``chain``, ``k_ary``, ``from_paths``, or for the
  most expected tokens by ``sequoia`` and ``best_first``; ``expected_tokens``;
  ``best_size`` picks the size that is fastest on given hardware;
- trees on the device, a budget of nodes and how many count: ``TreeArrays``,
  ``tree_arrays``, ``check_tree``;
- a pass: ``ancestors_mask``, ``pass_layout``;
- the best of scored candidates: ``best_n``, ``keep_best``, ``take_nodes``, and of a
  whole batch ``share_budget``;
- growing: ``expand`` and ``rerank`` level by level, ``top_children``,
  ``best_n_marginals`` from one law a depth, ``merge_continuations`` from found text.

For example, the best seven drafts where the first child is right at 0.7, the second
at 0.2::

    >>> from specjax import trees
    >>> tree = trees.sequoia([0.7, 0.2], n_nodes=7)
    >>> round(trees.expected_tokens(tree, [0.7, 0.2]), 3)
    3.281
    >>> trees.pass_layout(tree).offsets.tolist()
    [0, 1, 1, 2, 2, 3, 4, 5]
"""

from specjax.trees._arrays import (
    ROOT,
    TreeArrays,
    ancestors_mask,
    check_tree,
    tree_arrays,
)
from specjax.trees._best import Best, best_n, keep_best, share_budget, take_nodes
from specjax.trees._build import chain, from_paths, k_ary
from specjax.trees._expand import (
    Candidates,
    Children,
    DraftTree,
    Frontier,
    best_n_marginals,
    expand,
    rerank,
    top_children,
)
from specjax.trees._layout import PassLayout, pass_layout
from specjax.trees._merge import merge_continuations
from specjax.trees._sequoia import best_first, expected_tokens, sequoia
from specjax.trees._size import BestSize, best_size
from specjax.trees._topology import Topology

__all__ = [
    "ROOT",
    "Best",
    "BestSize",
    "Candidates",
    "Children",
    "DraftTree",
    "Frontier",
    "PassLayout",
    "Topology",
    "TreeArrays",
    "ancestors_mask",
    "best_first",
    "best_n",
    "best_n_marginals",
    "best_size",
    "chain",
    "check_tree",
    "expand",
    "expected_tokens",
    "from_paths",
    "k_ary",
    "keep_best",
    "merge_continuations",
    "pass_layout",
    "rerank",
    "sequoia",
    "share_budget",
    "take_nodes",
    "top_children",
    "tree_arrays",
]
