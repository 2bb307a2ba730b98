"""A smaller model as a drafter of trees, level by level.

References: Miao et al., "SpecInfer", arXiv:2305.09781; Jeon et al., "Recursive
Speculative Decoding", arXiv:2402.14160 (children drawn without replacement); Cai et
al., "Medusa", arXiv:2401.10774 (static trees of the most probable tokens).
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.drafters._drawing import Drafts, Drawing
from specjax.drafters._model_chain import ModelDrafter, ModelState
from specjax.drafters._protocol import (
    DraftContext,
    DrafterSpec,
    Proposal,
    n_wanted,
)
from specjax.models import Target
from specjax.trees import PassLayout, Topology
from specjax.typing import Array, Float, Int, Params


class ModelTreeDrafter(ModelDrafter):
    """The functions of the drafter, over its static side.

    The first pass of the draft model reads the text and gives the first level; the
    pass for every further level reads all nodes above it anew, side by side: a node
    may not attend its cousins, and which rows of the cache it may attend is said for
    the rows of one pass. That is depth passes in all, each wider than the last.
    """

    def __init__(self, draft: Target, tree: Topology, drawing: Drawing) -> None:
        super().__init__(draft, tree.n_nodes, drawing)
        self.tree, self.spare = tree, tree.n_nodes
        depth = tree.depth
        # Nodes that the last pass reads: what of the tree is in the cache afterwards.
        self.inner = np.flatnonzero(depth < tree.max_depth)

    def spec(self, name: str) -> DrafterSpec:
        return DrafterSpec(
            name=name,
            gamma=self.gamma,
            draws=self.drawing.kind,
            depth=self.tree.max_depth,
            topology=self.tree,
        )

    def propose(
        self, params: Params, state: ModelState, context: DraftContext
    ) -> tuple[Proposal, ModelState]:
        length = context.length
        alive = (length > 0) & (length + self.gamma <= state.capacity)
        n_valid = jnp.where(alive, n_wanted(context, self.gamma), 0)
        beyond = jnp.where(alive, 0, state.capacity - state.seen)
        grows = jnp.any(n_valid > 0)
        run = functools.partial(self._grow, params, context, alive, beyond)
        drafts, cache, seen = lax.cond(
            grows,
            run,
            lambda empty, cache, seen: (empty, cache, seen),
            self.drawing.empty(length.shape[0], self.gamma),
            state.cache,
            state.seen,
        )
        # The text is read, the pending token included; of the tree what is above its
        # last level, which only a walk down it can tell.
        read = jnp.where(alive & grows, length + self.tree.max_depth - 1, seen)
        state = state._replace(
            cache=cache, seen=seen, base=length, read=read, drafted=drafts.tokens
        )
        parents = jnp.broadcast_to(jnp.asarray(self.tree.parents), drafts.tokens.shape)
        return Proposal(drafts.tokens, drafts.logprobs, n_valid, parents=parents), state

    def commit(
        self, params: Params, state: ModelState, context: DraftContext
    ) -> ModelState:
        """Keeps what it read of the path that was committed, moved to where it goes."""
        path = self._kept(state, context)
        # As in the target: the tree stands behind the pending token.
        back = jnp.where(state.seen > 0, -1, 0)
        cache = self.draft.commit(state.cache, back)
        if len(self.inner):
            assert self.draft.gather_path is not None
            cache = self.draft.gather_path(cache, path, len(self.inner))
        n_same = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)
        seen = jnp.where(state.read > state.seen, state.base + n_same, state.seen)
        seen = jnp.clip(seen, 0, jnp.maximum(context.length - 1, 0))
        cache = self.draft.commit(cache, seen - state.seen - back)
        return state._replace(cache=cache, seen=seen)

    def _kept(self, state: ModelState, context: DraftContext) -> Int[Array, "B D"]:
        """Walks the tree by what was committed: rows of its last pass, -1 after."""
        slots = np.full((self.gamma,), -1, np.int32)
        slots[self.inner] = np.arange(len(self.inner))
        parents = jnp.asarray(self.tree.parents)[None, :]
        going = state.read > state.seen
        node, path = jnp.full(going.shape, -1), []
        for i in range(self.tree.max_depth - 1):
            at = state.base + i
            last = context.history.shape[1] - 1
            token = jnp.take_along_axis(
                context.history, jnp.minimum(at, last)[:, None], axis=1
            )
            same = (parents == node[:, None]) & (state.drafted == token)
            same &= jnp.asarray(slots >= 0)[None, :]
            going &= jnp.any(same, axis=1) & (at < context.length)
            node = jnp.where(going, jnp.argmax(same, axis=1), node)
            path.append(jnp.where(going, jnp.asarray(slots)[node], -1))
        return jnp.stack(path, axis=1) if path else jnp.zeros((len(going), 0), int)

    def _grow(self, params, context, alive, beyond, empty, cache, seen):
        """Reads what is missing and drafts; the cache ends at the committed text."""
        draft, tree = self.draft, self.tree
        cache = draft.commit(cache, beyond)
        cache, seen, n = self._read_up(params, context, alive, cache, seen)
        logits, cache = self._first(params, context, seen, n, cache)
        kept = self._children(empty, logits[:, None], context, (-1,))
        for level, above in enumerate(tree.levels[:-1], start=1):
            nodes = np.flatnonzero(tree.depth <= level)
            layout = PassLayout(
                tree.ancestors[np.ix_(nodes, nodes)][None],
                (tree.depth[nodes] - 1)[None],
            )
            logits, _, cache = draft.forward(
                params, self._known(kept.tokens[:, nodes]), cache, layout=layout
            )
            growing = tuple(node for node in above if tree.children[node + 1])
            rows = np.searchsorted(nodes, growing)
            kept = self._children(kept, logits[:, rows], context, growing)
        cache = draft.commit(cache, jnp.where(alive, 0, -beyond))
        return kept, cache, seen + n

    def _children(
        self,
        drafts: Drafts,
        logits: Float[Array, "B P D"],
        context: DraftContext,
        above: tuple[int, ...],
    ) -> Drafts:
        """Gives nodes their children; ``above`` names them, -1 the pending token."""
        tree = self.tree
        children = [
            {tree.ranks[child]: child for child in tree.children[node + 1]}
            for node in above
        ]
        n_ranks = 1 + max(rank for ranks in children for rank in ranks)
        depth = 0 if above == (-1,) else int(tree.depth[above[0]])
        numbers = [[ranks.get(r, -1) for ranks in children] for r in range(n_ranks)]
        tokens, laws = self.drawing.siblings(logits, context, depth, np.array(numbers))
        kept, where = drafts.tokens, np.array(numbers)
        for rank in range(n_ranks):
            real = where[rank] >= 0
            kept = kept.at[:, where[rank][real]].set(tokens[:, rank][:, real])
        kept_laws = drafts.logprobs
        if kept_laws is not None and laws is not None:
            kept_laws = kept_laws.at[:, np.array(above) + 1].set(laws)
        return Drafts(kept, kept_laws)
