"""Verify rules: which drafts are kept, and what follows them.

``greedy``, ``rejection``, ``block``, ``sample_and_match`` and ``coupled`` keep the
target's law, and so do ``recursive_rejection``, ``k_seq`` and ``traversal``, which are
for draft trees. ``typical``, ``relaxed``, ``lenient`` and ``judge`` do not
(``lossless=False``): they are made by functions whose docstrings name the law they
give, and the registry has the first three with their default parameters.

``VerifyRule.trees`` and ``siblings`` say which draft trees a rule takes;
``check_trees`` refuses others with the reason.
"""

from specjax.verify._block import block
from specjax.verify._k_seq import k_seq
from specjax.verify._lossy import judge, lenient, relaxed, typical
from specjax.verify._match import coupled, greedy
from specjax.verify._protocol import Evidence, Verdict, VerifyRule, accepted_prefix
from specjax.verify._recursive import recursive_rejection
from specjax.verify._rejection import rejection
from specjax.verify._sampled_match import sample_and_match
from specjax.verify._traversal import traversal
from specjax.verify._trees import check_trees

#: Rules by name.
REGISTRY: dict[str, VerifyRule] = {
    rule.name: rule
    for rule in (
        greedy,
        rejection,
        block,
        sample_and_match,
        coupled,
        recursive_rejection,
        k_seq,
        traversal,
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
    "check_trees",
    "coupled",
    "greedy",
    "judge",
    "k_seq",
    "lenient",
    "recursive_rejection",
    "rejection",
    "relaxed",
    "sample_and_match",
    "traversal",
    "typical",
]
