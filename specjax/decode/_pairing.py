"""Whether a drafter, a rule and a target go together."""

from typing import TYPE_CHECKING, Literal

from specjax.drafters import Drafter, check_target, match_noise
from specjax.verify import VerifyRule, check_trees

if TYPE_CHECKING:
    from specjax.models import Target


def pair(drafter: Drafter, rule: VerifyRule, target: "Target", *, exact: bool):
    """Checks that a drafter, a rule and a target go together.

    Args:
      drafter: any drafter.
      rule: the rule.
      target: what is decoded with.
      exact: whether ids must be the same with speculation on and off.

    Returns:
      The drafter in the form that the rule's noise likes best.

    Raises:
      ValueError: they do not; the message says why and what would.
    """
    drafter = match_noise(drafter, rule.noise)
    check_target(drafter, target.spec, halves=target.halves is not None)
    spec = drafter.spec
    if not spec.depth:
        return drafter
    how: Literal["iid", "without_replacement"] | None = None
    if spec.draws in ("sample", "without_replacement"):
        how = "iid" if spec.draws == "sample" else "without_replacement"
    check_trees(rule, dynamic=spec.topology is None, draws_siblings=how)
    if target.gather_path is None:
        raise ValueError(
            f"drafter {spec.name!r} drafts trees, and this target scores chains only: "
            "it has no gather_path."
        )
    if spec.exit_block:
        raise ValueError(
            f"drafter {spec.name!r} begins the target's pass, which goes on for chains "
            "only; use one that drafts chains."
        )
    if exact:
        raise ValueError(
            f"drafter {spec.name!r} drafts trees, whose nodes stand in other slots of "
            "the cache than the text will: sums over it round otherwise. exact=True "
            "needs a drafter of chains; without it ids differ at rounding ties only."
        )
    return drafter
