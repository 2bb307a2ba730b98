"""Verify rules: which drafts are kept, and what follows them.

``greedy``, ``rejection``, ``block``, ``sample_and_match`` and ``coupled`` keep the
target's law. ``typical``, ``relaxed``, ``lenient`` and ``judge`` do not
(``lossless=False``): they are made by functions whose docstrings name the law they
give, and the registry has the first three with their default parameters.
"""

from specjax.verify._block import block
from specjax.verify._lossy import judge, lenient, relaxed, typical
from specjax.verify._match import coupled, greedy
from specjax.verify._protocol import Evidence, Verdict, VerifyRule, accepted_prefix
from specjax.verify._rejection import rejection
from specjax.verify._sampled_match import sample_and_match

#: Rules by name.
REGISTRY: dict[str, VerifyRule] = {
    rule.name: rule
    for rule in (
        greedy,
        rejection,
        block,
        sample_and_match,
        coupled,
        typical(),
        relaxed(),
        lenient(),
    )
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
    "Evidence",
    "Verdict",
    "VerifyRule",
    "accepted_prefix",
    "block",
    "by_name",
    "coupled",
    "greedy",
    "judge",
    "lenient",
    "rejection",
    "relaxed",
    "sample_and_match",
    "typical",
]
