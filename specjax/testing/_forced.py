"""Forces every outcome of a rule through its noise; see ``oracle``."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import Proposal
from specjax.sampling import UniformNoise
from specjax.testing.tables import Drafts
from specjax.verify import Evidence, Verdict, VerifyRule

# Relative distance from a threshold at which decisions are probed, and the number of
# uniforms between 0 and 1 with which the next token's law is probed.
_NEAR, _N_DRAWS = 1e-5, 32

# How far a reported probability may be from the one that was found.
_REPORTED = 1e-5

# Enough to beat every finite score of a table.
_FORCE = 1e6


class Outcomes(NamedTuple):
    """What a pass may end in, one line each.

    Attributes:
      draft: the proposal, [L].
      weight: probability given the proposal, float64 [L].
      node: the last accepted draft position, -1 for none, [L].
      next_law: law of the token after it, float64 [L, V].
      dtype: precision the probabilities were computed in.
    """

    draft: np.ndarray
    weight: np.ndarray
    node: np.ndarray
    next_law: np.ndarray
    dtype: np.dtype


def force(
    rule: VerifyRule,
    drafts: Drafts,
    scores: np.ndarray,
    unwarped: np.ndarray,
    dtype: np.dtype,
    parents: np.ndarray | None,
) -> Outcomes:
    """Enumerates what a rule does with every proposal.

    Args:
      rule: the rule.
      drafts: the proposals.
      scores: the target's log-probabilities, float64 [R, N + 1, V].
      unwarped: those of ``Evidence``, likewise.
      dtype: what the rule is given.
      parents: of trees, [R, N]; None for chains.

    Returns:
      The outcomes.

    Raises:
      ValueError: the rule contradicts what it reports.
    """
    run = _Run(rule, drafts, scores, unwarped, dtype, parents)
    if rule.noise == "none":
        return _forced_nothing(run)
    if rule.noise == "gumbel":
        return _forced_choices(run)
    return _forced_uniforms(run)


def evidence_for(
    rule: VerifyRule, tokens: np.ndarray, unwarped: np.ndarray, dtype: Any
) -> tuple[Evidence, ...]:
    """Returns what ``verify`` takes after the noise.

    A table has no hidden states; a judge gets the log-probabilities in their place.
    """
    if not rule.evidence:
        return ()
    logprobs = jnp.asarray(unwarped, dtype)
    judge = rule.judge
    scores = None if judge is None else judge(logprobs, jnp.asarray(tokens))
    return (Evidence(logprobs, scores),)


class _Run:
    """A rule, and the proposals it is run on."""

    def __init__(
        self,
        rule: VerifyRule,
        drafts: Drafts,
        scores: np.ndarray,
        unwarped: np.ndarray,
        dtype: np.dtype,
        parents: np.ndarray | None,
    ):
        self.parents = parents
        self.rule, self.drafts, self.scores, self.dtype = rule, drafts, scores, dtype
        self._unwarped = unwarped
        self._verify = jax.jit(rule.verify)

    @property
    def vocab_size(self) -> int:
        return self.scores.shape[-1]

    def lines(self, repeat: int) -> np.ndarray:
        """Returns the proposal of every line when each is repeated."""
        return np.repeat(np.arange(len(self.drafts.tokens)), repeat)

    def repeated(self, repeat: int) -> Callable[[Any], Verdict]:
        """Returns noise -> verdict, every proposal being repeated."""
        again = lambda x: np.repeat(x, repeat, axis=0)
        tokens, n_valid = again(self.drafts.tokens), again(self.drafts.n_valid)
        logprobs = self.drafts.logprobs
        if logprobs is not None:
            logprobs = jnp.asarray(again(logprobs), self.dtype)
        parents = None if self.parents is None else again(self.parents)
        proposal = Proposal(
            jnp.asarray(tokens),
            logprobs,
            jnp.asarray(n_valid),
            parents=None if parents is None else jnp.asarray(parents, jnp.int32),
        )
        scores = jnp.asarray(again(self.scores), self.dtype)
        rest = evidence_for(self.rule, tokens, again(self._unwarped), self.dtype)

        def run(noise: Any) -> Verdict:
            verdict = self._verify(proposal, scores, noise, *rest)
            n_accepted = np.asarray(verdict.n_accepted)
            if np.any((n_accepted < 0) | (n_accepted > n_valid)):
                self.refuse("accepts a count outside [0, n_valid]")
            if (parents is None) != (verdict.path is None):
                self.refuse("gives a path of a chain, or none of a tree")
            if parents is not None and not _is_path(verdict, parents, n_valid):
                self.refuse("keeps what is no path")
            return verdict

        return run

    @property
    def above(self) -> np.ndarray:
        """Whether position j is i or on the path to it, bool [R, N, N]."""
        n_drafts = self.drafts.tokens.shape[1]
        shape = (len(self.drafts.tokens), n_drafts, n_drafts)
        if self.parents is None:
            return np.broadcast_to(np.tri(n_drafts, dtype=bool), shape)
        mask = np.broadcast_to(np.eye(n_drafts, dtype=bool), shape).copy()
        for i, parent in enumerate(self.parents.T):
            theirs = mask[np.arange(len(mask)), np.maximum(parent, 0)]
            mask[:, i] |= theirs & (parent >= 0)[:, None]
        return mask

    def refuse(self, what: str) -> None:
        raise ValueError(f"{self.rule.name!r} {what}.")


def _node(verdict: Verdict) -> np.ndarray:
    last = np.asarray(verdict.n_accepted) - 1
    if verdict.path is None:
        return last
    path = np.pad(np.asarray(verdict.path), ((0, 0), (0, 1)), constant_values=-1)
    return path[np.arange(len(path)), last]


def _is_path(verdict: Verdict, parents: np.ndarray, n_valid: np.ndarray) -> bool:
    """Whether nodes that count are kept, each a child of the one before."""
    path, n = np.asarray(verdict.path), np.asarray(verdict.n_accepted)
    if path.shape != parents.shape:
        return False
    kept = np.arange(path.shape[1])[None, :] < n[:, None]
    before = np.pad(path, ((0, 0), (1, 0)), constant_values=-1)[:, : path.shape[1]]
    inside = (path >= 0) & (path < n_valid[:, None])
    follows = np.take_along_axis(parents, np.where(inside, path, 0), axis=1) == before
    return bool(np.all(np.where(kept, inside & follows, path == -1)))


def _forced_nothing(run: _Run) -> Outcomes:
    """Runs a rule without noise."""
    verdict = run.repeated(1)(None)
    return Outcomes(
        draft=run.lines(1),
        weight=np.ones(len(run.drafts.tokens)),
        node=_node(verdict),
        next_law=np.eye(run.vocab_size)[np.asarray(verdict.next_token)],
        dtype=run.dtype,
    )


def _forced_choices(run: _Run) -> Outcomes:
    """Forces every choice of a token in every row of the target."""
    n_drafts, n_rows, vocab = run.scores.shape
    choices = np.array(list(np.ndindex(*(vocab,) * n_rows)))
    laws = np.exp(run.scores)
    weight = np.ones((n_drafts, len(choices)))
    for i in range(n_rows):
        weight *= laws[:, i, choices[:, i]]
    noise = _FORCE * np.eye(vocab, dtype=run.dtype)[choices]
    verdict = run.repeated(len(choices))(jnp.asarray(np.tile(noise, (n_drafts, 1, 1))))
    return Outcomes(
        draft=run.lines(len(choices)),
        weight=weight.reshape(-1),
        node=_node(verdict),
        next_law=np.eye(vocab)[np.asarray(verdict.next_token)],
        dtype=run.dtype,
    )


def _forced_uniforms(run: _Run) -> Outcomes:
    """Forces every uniform number of every position into every cell."""
    n_drafts = run.drafts.tokens.shape[1]
    tree = run.parents is not None
    n_cells = run.vocab_size if _draws_rows(run.rule, tree) else 2
    cells = np.array(list(np.ndindex(*(n_cells,) * n_drafts)), int)
    cells = cells.reshape(n_cells**n_drafts, n_drafts)
    again, draft = run.repeated(len(cells)), run.lines(len(cells))
    # What a rule reports of its tests does not depend on the noise.
    info = again(_uniform(np.full((len(draft), n_drafts), 0.5, run.dtype), 0.5)).info
    info = {key: np.asarray(value)[:: len(cells)] for key, value in info.items()}
    edges = _edges(run, info)
    at = np.tile(cells, (len(edges), 1))[..., None]
    low = np.take_along_axis(edges[draft], at, axis=-1)[..., 0]
    high = np.take_along_axis(edges[draft], at + 1, axis=-1)[..., 0]

    one = np.nextafter(run.dtype.type(1), run.dtype.type(0))
    # The ends themselves are forced: 0 happens, and must not let anything through.
    first, last = at[..., 0] == 0, at[..., 0] == n_cells - 1
    middle = np.where(first, 0, np.where(last, one, (low + high) / 2))
    inside = (low * (1 + _NEAR) + 1e-9, np.where(last, one, high * (1 - _NEAR)))
    verdict = again(_uniform(middle.astype(run.dtype), 0.5))
    weight = (high - low).prod(-1)
    next_law, precision = _next_law(run, verdict, weight)
    outcomes = Outcomes(draft, weight, _node(verdict), next_law, precision)

    clear = (weight > 0) & np.all(inside[0] < inside[1], axis=-1)
    for u in inside:
        other = again(_uniform(np.minimum(u, one).astype(run.dtype), 0.5))
        law, _ = _next_law(run, other, np.where(clear, weight, 0))
        moved = np.abs(law - next_law).max(-1) > _REPORTED
        if np.any(((_node(other) != outcomes.node) | moved) & clear):
            run.refuse("decides otherwise than it reports")
    _check_draws(run, again, middle.astype(run.dtype), next_law, clear)
    _check_accept_prob(run, info, outcomes)
    return outcomes


@functools.cache
def _draws_rows(rule: VerifyRule, tree: bool) -> bool:
    """Whether a rule draws a token at every position, instead of testing."""
    like = lambda *shape: jnp.zeros(shape, jnp.float32)
    whole = lambda *shape: jnp.zeros(shape, jnp.int32)
    verdict = jax.eval_shape(
        rule.verify,
        Proposal(
            whole(1, 1), like(1, 1, 2), whole(1), parents=whole(1, 1) if tree else None
        ),
        like(1, 2, 2),
        UniformNoise(like(1, 1), like(1)),
        *((Evidence(like(1, 2, 2), like(1, 1)),) if rule.evidence else ()),
    )
    return "row_weights" in verdict.info


def _uniform(accept: np.ndarray, draw: float) -> UniformNoise:
    return UniformNoise(jnp.asarray(accept), jnp.full(len(accept), draw, accept.dtype))


def _edges(run: _Run, info: dict[str, Any]) -> np.ndarray:
    """Returns where a position's decision changes as its uniform grows, [R, N, C + 1].

    Two cells for a test, passed and failed; a cell a token where one is drawn.
    """
    if "row_weights" in info:
        weights = np.asarray(info["row_weights"]).astype(np.float64)
        total = weights.sum(-1, keepdims=True)
        if np.any(weights < 0) or not np.all(total > 0):
            run.refuse("has row_weights that are no law")
        edges = np.cumsum(weights, -1) / total
        # The last edge is where the last token that can be drawn ends: 1, rounded.
        edges = np.where(edges > 1 - 1e-15, 1.0, edges)
        return np.pad(edges, ((0, 0), (0, 0), (1, 0)))
    chance = np.asarray(info.get("test_prob", info.get("accept_prob")))
    chance = chance.astype(np.float64)[..., None]
    if not np.all((chance >= 0) & (chance <= 1)):
        run.refuse("reports probabilities outside [0, 1]")
    return np.concatenate([np.zeros_like(chance), chance, np.ones_like(chance)], -1)


def _next_law(
    run: _Run, verdict: Verdict, weight: np.ndarray
) -> tuple[np.ndarray, np.dtype]:
    """Returns the next token's law where an outcome has weight, and its precision."""
    weights = np.asarray(verdict.info["next_weights"])
    precision, weights = weights.dtype, weights.astype(np.float64)
    total, live = weights.sum(-1), weight > 0
    if np.any((weights < 0) & live[:, None]) or not np.all(total[live] > 0):
        run.refuse("has next_weights that are no law")
    return weights / np.where(total > 0, total, 1)[:, None], precision


def _check_draws(
    run: _Run,
    again: Callable[[UniformNoise], Verdict],
    accept: np.ndarray,
    next_law: np.ndarray,
    live: np.ndarray,
) -> None:
    """Checks that the next token is drawn from the law that is reported."""
    seen = np.zeros_like(next_law)
    for k in range(_N_DRAWS):
        token = np.asarray(again(_uniform(accept, (k + 0.5) / _N_DRAWS)).next_token)
        seen[np.arange(len(token)), token] += 1 / _N_DRAWS
    # An interval of width w holds wK midpoints of a grid of K, one more or one fewer.
    far = np.abs(seen - next_law).max(-1) > 1 / _N_DRAWS + 1e-5
    if np.any(far & live):
        run.refuse("draws from another law than next_weights")


def _check_accept_prob(run: _Run, info: dict[str, Any], outcomes: Outcomes) -> None:
    """Checks the probabilities of acceptance that are reported, draft by draft."""
    if "accept_prob" not in info:
        return
    chance, above = np.asarray(info["accept_prob"]).astype(np.float64), run.above
    reported = np.where(above, chance[:, None, :], 1).prod(-1)
    n_drafts = reported.shape[1]
    found = np.zeros_like(reported)
    # Row -1: nothing is kept.
    kept = np.pad(above, ((0, 0), (0, 1), (0, 0)))[outcomes.draft, outcomes.node]
    for i in range(n_drafts):
        weight = outcomes.weight * kept[:, i]
        found[:, i] = np.bincount(outcomes.draft, weight, minlength=len(found))
    valid = np.arange(n_drafts)[None, :] < run.drafts.n_valid[:, None]
    valid &= run.drafts.probability[:, None] > 0  # what is never drawn may err
    if np.any(valid & (np.abs(found - reported) > _REPORTED)):
        run.refuse("accepts with other probabilities than accept_prob")
