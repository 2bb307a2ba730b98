"""Suffix matching: what followed the text's last tokens before, here or elsewhere.

References: He et al., "REST", arXiv:2311.08252; Oliaro et al., "SuffixDecoding",
arXiv:2411.04975.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.drafters._datastore import Datastore
from specjax.drafters._prompt_lookup import matched_lengths
from specjax.drafters._protocol import (
    DraftContext,
    Drafter,
    DrafterSpec,
    Proposal,
    check_gamma,
    stateless,
)
from specjax.trees import merge_continuations, take_nodes
from specjax.typing import Array, Bool, Float, Int

# Entries of the order that a search looks at together: five rounds for a million
# tokens where halving takes twenty, and rounds are what small searches cost.
_PIVOTS = 31

# Probabilities and sums of them this close are equal: shares such as 1/3 * 3/10 are
# rounded, and not everywhere alike.
_SAME = 1e-5

# Before the beginning of the text: equal to no token and to no separator.
_NOTHING = -2


class _Settings(NamedTuple):
    gamma: int
    max_match: int
    min_match: int
    factor: float
    offset: float
    min_token_prob: float
    max_occurrences: int
    n_nodes: int


class _Draft(NamedTuple):
    """What one source proposes for one row.

    Attributes:
      tokens: [G], or of a tree's nodes [N].
      confidence: share of each token among what followed, 0 from n_valid on. [G]
      n_valid: []
      expected: tokens that will be accepted if the shares are the truth. []
      matched: length of the match. []
    """

    tokens: Int[Array, " G"]
    confidence: Float[Array, " G"]
    n_valid: Int[Array, ""]
    expected: Float[Array, ""]
    matched: Int[Array, ""]
    parents: Int[Array, " N"] | None = None


def suffix(
    gamma: int = 6,
    *,
    max_match: int = 16,
    min_match: int = 2,
    factor: float = 4.0,
    offset: float = 0.0,
    min_token_prob: float = 0.1,
    max_occurrences: int = 32,
    n_nodes: int | None = None,
) -> Drafter:
    """Proposes what most often followed the text's longest suffix.

    The last tokens of a row, ``min_match`` to ``max_match`` of them, are looked up in
    the row's own text, prompt and output, and in the ``Datastore`` that is the
    drafter's parameters (None: the row's text alone). Of each, the occurrences of the
    longest match vote, position by position: the most frequent next token is taken,
    of equally frequent ones the one with the most recent occurrence, which is the
    highest position; and only the occurrences that go on with it vote further. With C
    the share of a token among the votes and D the product of the shares so far, the
    draft ends where D falls below ``min_token_prob``, after
    ``floor(factor * match + offset)`` tokens, or where all documents end. An occurrence
    in the row's text that reaches its end goes on in the draft, periodically.

    With ``n_nodes`` what followed is merged to a tree instead, of the nodes with the
    largest D (``trees.merge_continuations``), no deeper than a draft would be long.

    The source with the larger sum of D, the number of tokens expected to be accepted,
    is proposed; of equal ones that with the longer match, then the row's own text.

    ``Proposal.confidence`` is C: the estimated probability that a token is accepted
    where those before it were; its running product is D. A lone occurrence has the
    share 1, which overstates it.

    Cost a row and pass: ``max_match`` comparisons of the whole text, and for the
    datastore 3 searches of log2(N) / 5 rounds, 31 positions and ``max_match`` tokens a
    round; then gamma * ``max_occurrences``**2 comparisons a source. Nothing is done on
    the host. The state is empty.

    Args:
      gamma: draft tokens a pass, at most; the depth of a tree.
      max_match: longest match looked for. Longer ones count as this long, and the
        occurrences are not told apart further.
      min_match: shortest match that counts. A wrong draft costs a wide pass.
      factor: draft tokens a matched token. Where a pass has one width whatever is
        drafted, short drafts save nothing and a large factor is best.
      offset: draft tokens beside those; may be negative.
      min_token_prob: least D of a draft token, in [0, 1].
      max_occurrences: occurrences that vote. Up to so many are counted exactly. Of
        more, the most recent ones of the row's text, and as many of the datastore's,
        evenly spaced by what stands before the match: a share among them is that among
        all within about 1 / (2 * sqrt(max_occurrences)) (standard error of a random
        sample).
      n_nodes: draft tokens of a tree, at most; None drafts chains.

    Returns:
      A drafter whose parameters are a ``Datastore`` or None. Equal calls give the
      identical drafter. Another content of a datastore of the same size compiles
      nothing.

    Raises:
      ValueError: a setting is out of range.

    Differs from paper: SuffixDecoding scores all match lengths, here only the longest
    of each source is.
    """
    check_gamma(gamma)
    if not 1 <= min_match <= max_match:
        raise ValueError(
            f"suffix needs 1 <= min_match <= max_match; got {min_match=}, {max_match=}."
        )
    if not (math.isfinite(factor) and math.isfinite(offset) and factor >= 0):
        raise ValueError(
            f"suffix needs a finite factor >= 0 and a finite offset; got {factor=}, "
            f"{offset=}."
        )
    if factor * max_match + offset < 1:
        raise ValueError(
            f"{factor=} and {offset=} allow no draft token even after {max_match=} "
            "matched ones; raise one of them."
        )
    if not 0 <= min_token_prob <= 1:
        raise ValueError(f"{min_token_prob=} must be in [0, 1].")
    if max_occurrences < 1:
        raise ValueError(f"{max_occurrences=} must be at least 1.")
    if n_nodes is not None and n_nodes < 1:
        raise ValueError(f"{n_nodes=} must be at least 1, or None for chains.")
    return _suffix(
        _Settings(
            gamma,
            max_match,
            min_match,
            float(factor),
            float(offset),
            float(min_token_prob),
            max_occurrences,
            n_nodes or 0,
        )
    )


@functools.cache
def _suffix(settings: _Settings) -> Drafter:
    def propose(params: Datastore | None, context: DraftContext) -> Proposal:
        row = functools.partial(_propose_row, store=params, settings=settings)
        draft = jax.vmap(row)(context.history, context.length)
        return Proposal(
            tokens=draft.tokens,
            logprobs=None,
            n_valid=draft.n_valid,
            confidence=draft.confidence,
            parents=draft.parents,
        )

    spec = DrafterSpec(name="suffix", gamma=settings.gamma)
    if settings.n_nodes:
        spec = DrafterSpec("suffix_tree", settings.n_nodes, depth=settings.gamma)
    return stateless(spec, propose)


def _propose_row(
    history: Int[Array, " L"],
    length: Int[Array, ""],
    *,
    store: Datastore | None,
    settings: _Settings,
) -> _Draft:
    windows, matched = _in_history(history, length, settings)
    choose = _merge if settings.n_nodes else _vote
    if store is None:
        return choose(windows, matched, settings)
    lacking = ((0, settings.max_occurrences - windows.shape[0]), (0, 0))
    windows = jnp.pad(windows, lacking, constant_values=-1)
    theirs = _in_datastore(store, history, length, settings)
    both = jax.tree.map(lambda *x: jnp.stack(x), (windows, matched), theirs)
    drafts = jax.vmap(functools.partial(choose, settings=settings))(*both)
    gain = drafts.expected[1] - drafts.expected[0]
    longer = drafts.matched[1] > drafts.matched[0]
    better = (gain > _SAME) | ((gain >= -_SAME) & longer)
    return jax.tree.map(lambda x: jnp.where(better, x[1], x[0]), drafts)


def _in_history(
    history: Int[Array, " L"], length: Int[Array, ""], settings: _Settings
) -> tuple[Int[Array, "K G"], Int[Array, ""]]:
    """Finds the longest match in the row's own text.

    Returns:
      What followed each occurrence, the most recent one first, -1 where nothing did;
      and the length of the match, 0 for none that counts.
    """
    size = history.shape[0]
    lengths = matched_lengths(history, length, settings.max_match)
    longest = jnp.max(lengths)
    longest = jnp.where(longest >= settings.min_match, longest, 0)
    hit = (lengths == longest) & (longest > 0)
    # As float32, of which XLA picks the largest without sorting all; exact, as no text
    # has 2**24 tokens.
    recent = jnp.where(hit, jnp.arange(size), -1).astype(jnp.float32)
    ends, _ = lax.top_k(recent, min(settings.max_occurrences, size))
    start = ends.astype(jnp.int32)[:, None] + 1
    steps = jnp.arange(settings.gamma)[None, :] % jnp.maximum(length - start, 1)
    windows = _take(history, start + steps)
    return jnp.where(start > 0, windows, -1), longest


def _in_datastore(
    store: Datastore,
    history: Int[Array, " L"],
    length: Int[Array, ""],
    settings: _Settings,
) -> tuple[Int[Array, "K G"], Int[Array, ""]]:
    """Finds the longest match in a datastore; returns what ``_in_history`` does."""
    back = length - 1 - jnp.arange(settings.max_match)
    query = jnp.where(back >= 0, _take(history, back), _NOTHING)
    # The best match is a neighbour of the place where the query would stand.
    place = _n_below(store, query, jnp.int32(settings.max_match), jnp.array([False]))
    beside = jnp.maximum(place + jnp.array([-1, 0]), 0)
    longest = jnp.max(_compare(store, beside, query)[0])
    longest = jnp.where(longest >= settings.min_match, longest, 0)
    first, last = _n_below(store, query, longest, jnp.array([False, True]))
    n_found = last - first
    k, most = jnp.arange(settings.max_occurrences), settings.max_occurrences
    # floor(k * n / most), without a product that overflows.
    spread = k * (n_found // most) + k * (n_found % most) // most
    index = first + jnp.where(n_found > most, spread, k)
    voters = (k < n_found) & (longest > 0)
    ends = jnp.where(voters, _take(store.order, index), -1)
    ends = -jnp.sort(-ends)[:, None]
    windows = _take(store.tokens, ends + 1 + jnp.arange(settings.gamma))
    return jnp.where(ends >= 0, windows, -1), longest


def _n_below(
    store: Datastore,
    query: Int[Array, " M"],
    depth: Int[Array, ""],
    or_equal: Bool[Array, " S"],
) -> Int[Array, " S"]:
    """Counts the entries of the order whose text is below the query's.

    Args:
      store: the datastore.
      query: the last tokens of a text, the last one first.
      depth: tokens that are compared, [] in [0, M].
      or_equal: whether to count the entries of equal text too; a search each.
    """
    strides, n_choices = [], store.size + 1
    while n_choices > 1:
        n_choices = -(-n_choices // (_PIVOTS + 1))
        strides.append(n_choices)

    def narrow(
        n_below: Int[Array, " S"], stride: Int[Array, ""]
    ) -> tuple[Int[Array, " S"], None]:
        pivots = n_below[:, None] + stride * jnp.arange(1, _PIVOTS + 1) - 1
        n_equal, below = _compare(store, pivots, query)
        below = jnp.where(n_equal >= depth, or_equal[:, None], below)
        below &= pivots < store.size
        return n_below + stride * jnp.sum(below, axis=1, dtype=jnp.int32), None

    none = jnp.zeros(or_equal.shape, jnp.int32)
    return lax.scan(narrow, none, jnp.asarray(strides, jnp.int32))[0]


def _compare(
    store: Datastore, entries: Int[Array, "*P"], query: Int[Array, " M"]
) -> tuple[Int[Array, "*P"], Bool[Array, "*P"]]:
    """Compares texts with the query, both read backwards.

    Returns:
      How many tokens are equal, and whether the first other one is below the query's.
    """
    depth = jnp.arange(query.shape[0])
    # Position 0 is a separator: nothing is equal from there on.
    text = _take(store.tokens, _take(store.order, entries)[..., None] - depth)
    differs = text != query
    n_equal = jnp.min(jnp.where(differs, depth, query.shape[0]), axis=-1)
    first = depth == n_equal[..., None]
    return n_equal, jnp.any(first & (text < query), axis=-1)


def _vote(
    windows: Int[Array, "K G"], matched: Int[Array, ""], settings: _Settings
) -> _Draft:
    """Takes the most frequent continuation, position by position."""
    limit = _limit(matched, settings)

    def step(carry, ids: Int[Array, " K"]):
        position, voting, going, survival = carry
        voting &= ids >= 0
        agree = (ids[:, None] == ids[None, :]) & voting[None, :]
        votes = jnp.where(voting, jnp.sum(agree, axis=1, dtype=jnp.int32), 0)
        # The first of equal ones: the windows are ordered by recency.
        token = ids[jnp.argmax(votes)]
        n_votes = jnp.maximum(jnp.sum(voting, dtype=jnp.int32), 1)
        share = jnp.max(votes).astype(jnp.float32) / n_votes.astype(jnp.float32)
        survival *= share
        going &= (position < limit) & (share > 0)
        going &= survival > settings.min_token_prob - _SAME
        kept = jnp.where(going, jnp.stack([share, survival]), 0.0)
        carry = position + 1, voting & (ids == token), going, survival
        return carry, (jnp.where(going, token, 0), going, *kept)

    everyone = jnp.ones((windows.shape[0],), bool)
    start = jnp.int32(0), everyone, jnp.bool_(True), jnp.float32(1)
    tokens, going, shares, survivals = lax.scan(step, start, windows.T)[1]
    return _Draft(
        tokens=tokens.astype(jnp.int32),
        confidence=shares,
        n_valid=jnp.sum(going, dtype=jnp.int32),
        expected=jnp.sum(survivals),
        matched=matched,
    )


def _merge(
    windows: Int[Array, "K G"], matched: Int[Array, ""], settings: _Settings
) -> _Draft:
    """Takes the continuations as a tree of the likeliest nodes."""
    lengths = jnp.full(windows.shape[:1], _limit(matched, settings))
    made = merge_continuations(windows, settings.n_nodes, lengths=lengths)
    survival = jnp.where(made.tree.valid, jnp.exp(made.scores), 0.0)
    # Below its parent's: what is left out takes nothing along that is kept.
    keep = made.tree.valid & (survival > settings.min_token_prob - _SAME)
    tree, index = take_nodes(keep, made.tree.parents, settings.n_nodes)
    survival = jnp.where(tree.valid, survival[index], 0.0)
    above = jnp.where(tree.parents < 0, 1.0, survival[jnp.maximum(tree.parents, 0)])
    return _Draft(
        tokens=jnp.where(tree.valid, made.tokens[index], 0),
        confidence=jnp.where(tree.valid, survival / above, 0.0),
        n_valid=tree.n_nodes,
        expected=jnp.sum(survival),
        matched=matched,
        parents=tree.parents,
    )


def _limit(matched: Int[Array, ""], settings: _Settings) -> Int[Array, ""]:
    """Returns how many tokens a match of some length is followed for."""
    lengths = np.arange(settings.max_match + 1)
    limits = np.floor(settings.factor * lengths + settings.offset)
    limits[0] = 0
    limits = jnp.asarray(np.clip(limits, 0, settings.gamma), jnp.int32)
    return _take(limits, matched)


def _take(values: Int[Array, " N"], index: Int[Array, "*I"]) -> Int[Array, "*I"]:
    """Reads at indices, of which those outside read the nearest end."""
    return jnp.take(values, index, mode="clip")
