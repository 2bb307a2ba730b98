"""Drafters by name, for flags and files of settings."""

from collections.abc import Callable
from typing import NamedTuple

from specjax.drafters._early_exit import early_exit
from specjax.drafters._from_model import (
    ModelLike,
    layer_skip,
    lower_precision,
    sparse_kv,
)
from specjax.drafters._lookahead import lookahead
from specjax.drafters._plain import plain
from specjax.drafters._prompt_lookup import prompt_lookup
from specjax.drafters._protocol import BoundDrafter, Drafter, check_gamma
from specjax.drafters._quantized import quantized
from specjax.drafters._suffix import suffix
from specjax.drafters._token_recycling import token_recycling
from specjax.trees import Topology, sequoia

#: Drafters by name, each taking gamma (``plain`` ignores it).
REGISTRY: dict[str, Callable[[int], Drafter]] = {
    "plain": lambda gamma: plain(),
    "prompt_lookup": lambda gamma: prompt_lookup(gamma),
    "suffix": lambda gamma: suffix(gamma),
    "lookahead": lambda gamma: lookahead(gamma),
}


# How often the answer of each rank is right, roughly: what a tree of a given size is
# made for. Another guess changes the tree, and no text.
_RANKS = (0.4, 0.12, 0.07, 0.05, 0.03, 0.03, 0.02, 0.02)


def _shape(gamma: int, numbers: list[int]) -> int | Topology:
    """Returns a tree of so many nodes, at most gamma deep; or gamma, for a chain."""
    return sequoia(_RANKS, numbers[0], max_depth=gamma) if numbers else gamma


class SelfDraft(NamedTuple):
    """How a drafter that a target makes of itself is named and made.

    Attributes:
      usage: how its name is written.
      counts: how many numbers may follow the colon.
      make: (model, gamma, numbers) -> drafter.
    """

    usage: str
    counts: tuple[int, ...]
    make: Callable[[ModelLike, int, list[int]], BoundDrafter]


def _early_exit(model: ModelLike, gamma: int, numbers: list[int]) -> BoundDrafter:
    made = early_exit(model.target, numbers[0], gamma, n_ids=model.n_ids)
    return BoundDrafter(made, None)


def _layer_skip(model: ModelLike, gamma: int, numbers: list[int]) -> BoundDrafter:
    blocks = range(numbers[0], numbers[-1] + 1)
    return layer_skip(model, gamma, attention=blocks, ff=blocks)


def _sparse_kv(model: ModelLike, gamma: int, numbers: list[int]) -> BoundDrafter:
    return sparse_kv(model, gamma, sinks=numbers[0], window=numbers[1])


def _token_recycling(model: ModelLike, gamma: int, numbers: list[int]) -> BoundDrafter:
    vocab_size = model.target.spec.vocab_size
    return BoundDrafter(token_recycling(vocab_size, _shape(gamma, numbers)), None)


def _suffix_tree(model: ModelLike, gamma: int, numbers: list[int]) -> BoundDrafter:
    return BoundDrafter(suffix(gamma, n_nodes=numbers[0]), None)


def _int8(model: ModelLike, gamma: int, numbers: list[int]) -> BoundDrafter:
    return quantized(model, gamma, bits=8, group=numbers[0] if numbers else "default")


def _int4(model: ModelLike, gamma: int, numbers: list[int]) -> BoundDrafter:
    return quantized(model, gamma, bits=4, group=numbers[0] if numbers else "default")


#: Drafters that are made of or for one target, by name.
SELF_DRAFTS: dict[str, SelfDraft] = {
    "early_exit": SelfDraft("early_exit:BLOCKS", (1,), _early_exit),
    "layer_skip": SelfDraft("layer_skip:FIRST-LAST", (1, 2), _layer_skip),
    "sparse_kv": SelfDraft("sparse_kv:SINKS-WINDOW", (2,), _sparse_kv),
    "token_recycling": SelfDraft("token_recycling[:NODES]", (0, 1), _token_recycling),
    "suffix_tree": SelfDraft("suffix_tree:NODES", (1,), _suffix_tree),
    "bfloat16": SelfDraft(
        "bfloat16", (0,), lambda model, gamma, _: lower_precision(model, gamma)
    ),
    "int8": SelfDraft("int8[:GROUP]", (0, 1), _int8),
    "int4": SelfDraft("int4[:GROUP]", (0, 1), _int4),
}

#: The name of a drafter that a draft model makes (``from_model``).
DRAFT_MODEL = "model"
_MODEL_USAGE = f"{DRAFT_MODEL}[:NODES]"


def check_name(name: str, gamma: int, *, has_draft: bool = False) -> None:
    """Checks a drafter's name before a model is loaded for it.

    Args:
      name: of the registry, or of a self-draft: ``early_exit:20`` runs 20 blocks,
        ``layer_skip:10-14`` leaves out blocks 10 to 14 whole, ``sparse_kv:4-508``
        attends to the first 4 tokens and the last 508, ``int4:64`` has a scale for 64
        weights.
      gamma: draft tokens a pass.
      has_draft: whether there is a draft model, for which the name is ``model``, or
        ``model:12`` for a tree of 12 nodes.

    Raises:
      ValueError: the name is not known or what follows the colon is wrong, or gamma is
        out of range; or a draft model is missing, or is there for another name.
    """
    kind, _, rest = name.partition(":")
    if has_draft != (kind == DRAFT_MODEL):
        raise ValueError(
            f"draft_model goes with drafter {DRAFT_MODEL!r}; the drafter is {name!r}."
            if has_draft
            else f"drafter {name!r} needs draft_model, a smaller model of the same "
            "tokens; in Python, drafters.from_model(target, draft, gamma) makes it."
        )
    if has_draft:
        check_gamma(gamma)
        draft_shape(name, gamma)
        return
    if kind in SELF_DRAFTS:
        check_gamma(gamma)
        _numbers(name, kind, rest)
        return
    if name not in REGISTRY:
        raise ValueError(
            f"drafter {name!r} is not known; known drafters: {', '.join(usages())}."
        )
    check_gamma(gamma, least=0 if name == "plain" else 1)


def usages() -> list[str]:
    """Returns how the drafters' names are written."""
    own = [kind.usage for kind in SELF_DRAFTS.values()]
    return [*sorted(REGISTRY), *own, _MODEL_USAGE]


def draft_shape(name: str, gamma: int) -> int | Topology:
    """Reads what a draft model is to draft.

    Args:
      name: ``model`` for a chain, ``model:12`` for a tree of 12 nodes.
      gamma: draft tokens of a chain; how deep a tree may be.

    Returns:
      What ``from_model`` takes as ``gamma``.

    Raises:
      ValueError: the name is another, or not understood.
    """
    kind, _, rest = name.partition(":")
    numbers = _read(name, rest, _MODEL_USAGE, (0, 1))
    if kind != DRAFT_MODEL or numbers == [0]:
        raise ValueError(f"drafter {name!r} is not understood; write {_MODEL_USAGE}.")
    return _shape(gamma, numbers)


def by_name(name: str, gamma: int) -> Drafter:
    """Makes a drafter of the registry.

    Args:
      name: its name.
      gamma: draft tokens a pass.

    Returns:
      The drafter.

    Raises:
      ValueError: the name is not known, or gamma is out of range, or a drafter of
        this name is made of a model.
    """
    check_name(name, gamma)
    if name not in REGISTRY:
        raise ValueError(
            f"drafter {name!r} is made of its target; use drafters.for_target."
        )
    return REGISTRY[name](gamma)


def for_target(name: str, gamma: int, model: ModelLike) -> BoundDrafter:
    """Makes any drafter that has a name.

    Args:
      name: see ``check_name``.
      gamma: draft tokens a pass.
      model: what it will draft for.

    Returns:
      The drafter, with the target's parameters where it is one of its own.

    Raises:
      ValueError: see ``check_name``; or the target has no such blocks or type.
    """
    check_name(name, gamma)
    if name in REGISTRY:
        return BoundDrafter(REGISTRY[name](gamma), None)
    kind, _, rest = name.partition(":")
    return SELF_DRAFTS[kind].make(model, gamma, _numbers(name, kind, rest))


def _numbers(name: str, kind: str, rest: str) -> list[int]:
    """Reads what follows the colon of a self-draft's name."""
    usage, counts, _ = SELF_DRAFTS[kind]
    return _read(name, rest, usage, counts)


def _read(name: str, rest: str, usage: str, counts: tuple[int, ...]) -> list[int]:
    parts = rest.split("-") if rest else []
    if len(parts) not in counts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"drafter {name!r} is not understood; write {usage}.")
    return [int(part) for part in parts]
