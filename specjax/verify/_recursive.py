"""Recursive rejection of children that were drawn without replacement."""

from specjax.sampling import UniformNoise
from specjax.typing import Array, Float
from specjax.verify._protocol import ProposalLike, Verdict, VerifyRule
from specjax.verify._rejection import reject
from specjax.verify._tree_rows import reject_tree


def _recursive(
    proposal: ProposalLike,
    target_scores: Float[Array, "B N1 V"],
    noise: UniformNoise,
) -> Verdict:
    """Tests children in the order of their draws; see ``recursive_rejection``."""
    if proposal.parents is None:
        return reject(proposal, target_scores, noise, leniency=1.0)
    return reject_tree(proposal, target_scores, noise, siblings="without_replacement")


#: Jeon et al., arXiv:2402.14160 (recursive rejection sampling); Chen et al.,
#: arXiv:2402.12374 (Sequoia). The children of a node are drawn without replacement and
#: tested in the order of their draws: with r = p and s = q at first, child x passes
#: with probability min(1, r(x)/s(x)); a rejected one leaves the normalised
#: max(r - s, 0) for r, and for s what is left of it without x, normalised. If none
#: passes the token is drawn from r. Once s has no weight left children are uniform
#: draws from the tokens that were not tried, as Sequoia's are. Lossless for children
#: drawn so from the proposal's own ``logprobs``, in node order, in a tree whose shape
#: does not depend on them; for point masses (as ``rejection`` then), whatever the
#: shape. On chains it is ``rejection``.
recursive_rejection = VerifyRule(
    name="recursive_rejection",
    lossless=True,
    noise="uniform",
    greedy_only=False,
    verify=_recursive,
    trees="static",
    siblings="without_replacement",
)
