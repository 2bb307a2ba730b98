"""How a target pass over a tree is laid out."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.trees._arrays import TreeArrays, ancestors_mask
from specjax.trees._topology import Topology


class PassLayout(NamedTuple):
    """The rows of a pass: the pending token, then the nodes.

    Attributes:
      mask: whether row i attends row j, beside all committed tokens. Row 0, the
        pending token, attends itself; a node itself, the nodes above it and the
        pending token; padding itself alone. bool [*B, N + 1, N + 1]
      offsets: positions of the rows after the pending token's: 0 for it, the depth
        for nodes, 0 for padding. int32 [*B, N + 1]
    """

    mask: Any
    offsets: Any


def pass_layout(
    tree: Topology | TreeArrays, *, max_depth: int | None = None
) -> PassLayout:
    """Lays out a pass over a tree.

    Args:
      tree: static, or arrays with leading batch axes.
      max_depth: no node of the arrays is deeper; saves work. None is N.

    Returns:
      Mask and position offsets, NumPy for a static tree, else of the arrays' batch
      axes. For a chain the mask is lower triangular and the offsets count up.
    """
    if isinstance(tree, Topology):
        mask, valid, xp = tree.ancestors, np.ones(tree.n_nodes, bool), np
    else:
        mask = ancestors_mask(tree.parents, tree.n_nodes, max_depth=max_depth)
        valid, xp = tree.valid, jnp
    batch = [(0, 0)] * (valid.ndim - 1)
    mask = xp.pad(mask, [*batch, (1, 0), (1, 0)])
    # Column 0: who attends the pending token.
    root = xp.pad(valid, [*batch, (1, 0)], constant_values=True)[..., None]
    mask = xp.concatenate([root, mask[..., 1:]], axis=-1)
    return PassLayout(mask, xp.pad(tree.depth, [*batch, (1, 0)]))
