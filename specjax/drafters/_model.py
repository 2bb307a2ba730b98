"""A draft model with parameters and a cache of its own, as a chain or a tree."""

import functools

from specjax.drafters._drawing import Drawing, Draws, check_draws
from specjax.drafters._model_chain import ModelDrafter
from specjax.drafters._model_tree import ModelTreeDrafter
from specjax.drafters._protocol import Drafter, check_gamma
from specjax.models import Target
from specjax.trees import Topology


def model(
    draft: Target,
    gamma: int | Topology = 4,
    *,
    vocab_size: int | None = None,
    n_ids: int | None = None,
    draws: Draws = "sample",
    name: str = "model",
) -> Drafter:
    """Drafts with a model of its own parameters and cache.

    As a tree it makes one pass a level and one in front; a node's children are the
    first of its law's ranks, or drawn. References: Miao et al., "SpecInfer",
    arXiv:2305.09781 (independent children); Chen et al., "Sequoia", arXiv:2402.12374,
    and Jeon et al., arXiv:2402.14160 (children without replacement).

    Whether its vocabulary means the same tokens as the target's is for the caller to
    know: ``drafters.from_model`` compares the tokenizers. A row whose text outgrows the
    draft model's context is decoded plainly from there.

    Args:
      draft: the draft model; its parameters are the drafter's.
      gamma: draft tokens a pass, each one pass of the draft model; or a tree.
      vocab_size: of the target; None: as the draft model's. Ids that the draft model
        lacks are never drafted.
      n_ids: ids that have a token in both; None: all.
      draws: ``sample`` draws under the row's own settings and is exact under every
        rule; rules that take Gumbel noise get the ``coupled`` form of it by
        themselves. Children of a node are then drawn independently, and
        ``without_replacement`` in turn from what is left, which other rules take
        (``verify.check_trees``). ``argmax`` proposes point masses, the most probable
        tokens of a node as its children.
      name: for statistics and messages.

    Returns:
      The drafter. Equal calls give the identical one.

    Raises:
      ValueError: gamma is out of range, the cache cannot be rolled back by its length
        or take a tree, ``draws`` is not known, there are more ids than rows of logits
        or fewer than a node's children, or ranks are left out of a tree whose children
        are drawn.
    """
    tree = gamma if isinstance(gamma, Topology) and not gamma.is_chain else None
    check_gamma(gamma.n_nodes if isinstance(gamma, Topology) else gamma)
    if draft.spec.cache_kind != "kv":
        raise ValueError(
            f"A draft model's cache must roll back by its length; this one is of kind "
            f"{draft.spec.cache_kind!r}."
        )
    check_draws(draws, tree=tree is not None)
    vocab_size = draft.spec.vocab_size if vocab_size is None else vocab_size
    most = min(vocab_size, draft.spec.vocab_size)
    n_ids = most if n_ids is None else n_ids
    if not 1 <= n_ids <= most:
        raise ValueError(f"{n_ids=} must be in [1, {most}], the ids that both have.")
    if tree is not None:
        _check_tree(draft, tree, n_ids, draws)
    elif isinstance(gamma, Topology):
        gamma = gamma.n_nodes
    return _model(draft, gamma, vocab_size, n_ids, draws, name)


def _check_tree(draft: Target, tree: Topology, n_ids: int, draws: Draws) -> None:
    """Checks that a draft model can grow a tree."""
    if draft.gather_path is None:
        raise ValueError(
            f"A tree's committed path must be moved in the draft model's cache, and "
            f"this one (of kind {draft.spec.cache_kind!r}) cannot; give gamma as a "
            "number, for a chain."
        )
    if 1 + max(tree.ranks) > n_ids:
        raise ValueError(
            f"A node has {1 + max(tree.ranks)} children and only {n_ids=} can be drawn."
        )
    if tree.has_gaps and draws in ("sample", "without_replacement"):
        raise ValueError(
            f"{draws=} draws a node's children in turn, and this tree leaves ranks out "
            f"({tree.rank_paths}); use draws='argmax', or a tree without gaps."
        )


@functools.cache
def _model(
    draft: Target,
    gamma: int | Topology,
    vocab_size: int,
    n_ids: int,
    draws: Draws,
    name: str,
) -> Drafter:
    """Makes the drafter; arguments that mean the same are the same here."""
    again = functools.partial(_model, draft, gamma, vocab_size, n_ids, "coupled", name)
    drawing = Drawing(vocab_size, n_ids, draws)
    if isinstance(gamma, Topology):
        made = ModelTreeDrafter(draft, gamma, drawing)
    else:
        made = ModelDrafter(draft, gamma, drawing)
    drawn = draws in ("sample", "without_replacement")
    return made.drafter(name, again if drawn else None)
