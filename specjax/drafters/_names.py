"""Drafters by name, for flags and files of settings."""

from collections.abc import Callable

from specjax.drafters._early_exit import early_exit
from specjax.drafters._from_model import ModelLike, layer_skip, lower_precision
from specjax.drafters._plain import plain
from specjax.drafters._prompt_lookup import prompt_lookup
from specjax.drafters._protocol import BoundDrafter, Drafter, check_gamma
from specjax.drafters._suffix import suffix

#: Drafters by name, each taking gamma (``plain`` ignores it).
REGISTRY: dict[str, Callable[[int], Drafter]] = {
    "plain": lambda gamma: plain(),
    "prompt_lookup": lambda gamma: prompt_lookup(gamma),
    "suffix": lambda gamma: suffix(gamma),
}

#: Names of drafters that a target makes of itself, and what follows the colon.
SELF_DRAFTS = {
    "early_exit": "early_exit:BLOCKS",
    "layer_skip": "layer_skip:FIRST-LAST",
    "bfloat16": "bfloat16",
}


def check_name(name: str, gamma: int) -> None:
    """Checks a drafter's name before a model is loaded for it.

    Args:
      name: of the registry, or of a self-draft: ``early_exit:20`` runs 20 blocks,
        ``layer_skip:10-14`` leaves out blocks 10 to 14 whole.
      gamma: draft tokens a pass.

    Raises:
      ValueError: the name is not known or what follows the colon is wrong, or gamma is
        out of range.
    """
    kind, _, rest = name.partition(":")
    if kind in SELF_DRAFTS:
        check_gamma(gamma)
        _numbers(name, kind, rest)
        return
    if name not in REGISTRY:
        raise ValueError(
            f"drafter {name!r} is not known; known drafters: "
            f"{', '.join([*sorted(REGISTRY), *SELF_DRAFTS.values()])}."
        )
    check_gamma(gamma, least=0 if name == "plain" else 1)


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
    numbers = _numbers(name, kind, rest)
    if kind == "bfloat16":
        return lower_precision(model, gamma)
    if kind == "early_exit":
        made = early_exit(model.target, numbers[0], gamma, n_ids=model.n_ids)
        return BoundDrafter(made, None)
    first, last = numbers[0], numbers[-1]
    blocks = range(first, last + 1)
    return layer_skip(model, gamma, attention=blocks, ff=blocks)


def _numbers(name: str, kind: str, rest: str) -> list[int]:
    """Reads what follows the colon."""
    counts = {"bfloat16": (0,), "early_exit": (1,), "layer_skip": (1, 2)}[kind]
    parts = rest.split("-") if rest else []
    if len(parts) not in counts or not all(part.isdecimal() for part in parts):
        raise ValueError(
            f"drafter {name!r} is not understood; write {SELF_DRAFTS[kind]}."
        )
    return [int(part) for part in parts]
