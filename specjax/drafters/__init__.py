"""The drafter protocol and the zoo."""

from collections.abc import Callable

from specjax.drafters._adaptive import PassCosts, adaptive
from specjax.drafters._combine import fallback, truncate
from specjax.drafters._datastore import (
    Datastore,
    build_datastore,
    documents_of,
    extend_datastore,
    load_datastore,
    save_datastore,
)
from specjax.drafters._early_exit import early_exit
from specjax.drafters._from_model import from_model, layer_skip, lower_precision
from specjax.drafters._model import model
from specjax.drafters._plain import plain
from specjax.drafters._prompt_lookup import prompt_lookup
from specjax.drafters._protocol import (
    BoundDrafter,
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    Started,
    TargetView,
    check_gamma,
    match_noise,
    stateless,
    unbind,
)
from specjax.drafters._suffix import suffix

#: Drafters by name, each taking gamma (``plain`` ignores it).
REGISTRY: dict[str, Callable[[int], Drafter]] = {
    "plain": lambda gamma: plain(),
    "prompt_lookup": lambda gamma: prompt_lookup(gamma),
    "suffix": lambda gamma: suffix(gamma),
}


def by_name(name: str, gamma: int) -> Drafter:
    """Makes a drafter of the registry.

    Args:
      name: its name.
      gamma: draft tokens a pass.

    Returns:
      The drafter.

    Raises:
      ValueError: the name is not known, or gamma is out of range.
    """
    if name not in REGISTRY:
        raise ValueError(
            f"drafter {name!r} is not known; known drafters: "
            f"{', '.join(sorted(REGISTRY))}."
        )
    check_gamma(gamma, least=0 if name == "plain" else 1)
    return REGISTRY[name](gamma)


__all__ = [
    "REGISTRY",
    "BoundDrafter",
    "Datastore",
    "DraftContext",
    "Drafter",
    "DrafterSpec",
    "PassCosts",
    "Proposal",
    "Started",
    "TargetView",
    "adaptive",
    "build_datastore",
    "by_name",
    "check_gamma",
    "documents_of",
    "early_exit",
    "extend_datastore",
    "fallback",
    "from_model",
    "layer_skip",
    "load_datastore",
    "lower_precision",
    "match_noise",
    "model",
    "plain",
    "prompt_lookup",
    "save_datastore",
    "stateless",
    "suffix",
    "truncate",
    "unbind",
]
