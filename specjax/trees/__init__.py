"""Draft trees: their shapes, what a pass over them attends, and which are best.

A tree's nodes are draft tokens; its root is the pending token, which is no node. A
target pass has the rows [pending token, node 0, node 1, ...]. Parents come before
children; siblings of a static tree stand in draft order.

- static trees: ``Topology``, built by ``chain``, ``k_ary``, ``from_paths``, or for the
  most expected tokens by ``sequoia`` and ``best_first``; ``expected_tokens``;
  ``best_size`` picks the size that is fastest on given hardware;
- trees on the device, a budget of nodes and how many count: ``TreeArrays``,
  ``tree_arrays``, ``check_tree``;
- a pass: ``ancestors_mask``, ``pass_layout``.

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
from specjax.trees._build import chain, from_paths, k_ary
from specjax.trees._layout import PassLayout, pass_layout
from specjax.trees._sequoia import best_first, expected_tokens, sequoia
from specjax.trees._size import BestSize, best_size
from specjax.trees._topology import Topology

__all__ = [
    "ROOT",
    "BestSize",
    "PassLayout",
    "Topology",
    "TreeArrays",
    "ancestors_mask",
    "best_first",
    "best_size",
    "chain",
    "check_tree",
    "expected_tokens",
    "from_paths",
    "k_ary",
    "pass_layout",
    "sequoia",
    "tree_arrays",
]
