"""Verify rules: which drafts are kept, and what follows them."""

from specjax.verify._match import coupled, greedy
from specjax.verify._protocol import Verdict, VerifyRule, accepted_prefix
from specjax.verify._rejection import rejection

#: Rules by name.
REGISTRY: dict[str, VerifyRule] = {
    rule.name: rule for rule in (greedy, rejection, coupled)
}


def by_name(name: str) -> VerifyRule:
    """Returns a rule of the registry.

    Raises:
      ValueError: the name is not known.
    """
    if name not in REGISTRY:
        raise ValueError(
            f"rule {name!r} is not known; known rules: {', '.join(sorted(REGISTRY))}."
        )
    return REGISTRY[name]


__all__ = [
    "REGISTRY",
    "Verdict",
    "VerifyRule",
    "accepted_prefix",
    "by_name",
    "coupled",
    "greedy",
    "rejection",
]
