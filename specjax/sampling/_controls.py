"""What a request asks of its logits before the warp, position by position.

The order is: bias and bans, repetition penalty, presence and frequency penalties,
forced tokens, stop ids before the least length, finite-state constraint. A row that
scores the token after some drafts counts those drafts as if they were committed, so
that every position is treated as plain decoding would treat it; what is kept from
pass to pass grows by committed tokens only, so rejected drafts leave no trace.

Rows of a pass form a tree: row 0 is the pending token and row i + 1 is draft i, whose
parent is an earlier row. A chain is the tree of one branch.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.trees import PassLayout, pass_layout, tree_arrays
from specjax.typing import Array, Bool, Float, Int

#: State of a row that has no finite-state constraint.
UNCONSTRAINED = -1


class ControlSpec(NamedTuple):
    """Which controls a decode loop carries; static. What is off costs nothing.

    Attributes:
      penalties: repetition, presence and frequency penalties.
      bias: logit bias and bans.
      forced: forced tokens.
      min_new: a least number of new tokens.
      n_mask_states: states of all finite-state constraints together; 0 is none.
    """

    penalties: bool = False
    bias: bool = False
    forced: bool = False
    min_new: bool = False
    n_mask_states: int = 0

    def covers(self, other: "ControlSpec") -> bool:
        """Whether a loop with this specification can serve another one's requests."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


class Penalties(NamedTuple):
    """Penalties of each row and what they count.

    Attributes:
      repetition: positive logits of tokens in prompt or output are divided by it,
        others multiplied; 1 is off. [B] float32 (Keskar et al., arXiv:1909.05858,
        section 4.1, in the sign-aware form of ``transformers``.)
      presence: subtracted from the logits of tokens in the output. [B] float32
      frequency: subtracted as often as the token is in the output. [B] float32
      in_prompt: whether a token is in the prompt. [B, V]
      counts: how often a token is in the committed output. [B, V] int32
    """

    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    in_prompt: Bool[Array, "B V"]
    counts: Int[Array, "B V"]


class MaskState(NamedTuple):
    """Finite-state constraints.

    Attributes:
      state: of each row's constraint after its committed tokens, or
        ``UNCONSTRAINED``. [B]
      transitions: next states of all constraints, -1 where a token is not allowed;
        shared by the rows. [Q, V]
    """

    state: Int[Array, " B"]
    transitions: Int[Array, "Q V"]


class ControlState(NamedTuple):
    """Controls of each batch row; None where the loop does not carry one.

    Attributes:
      penalties: see ``Penalties``.
      bias: added to the logits; -inf bans a token. [B, V] float32
      forced: id that must stand at an absolute position, -1 where free. [B, L]
      min_length: no stop id at positions below this. [B]
      mask: see ``MaskState``.
    """

    penalties: Penalties | None = None
    bias: Float[Array, "B V"] | None = None
    forced: Int[Array, "B L"] | None = None
    min_length: Int[Array, " B"] | None = None
    mask: MaskState | None = None


def init_controls(
    spec: ControlSpec, *, batch: int, size: int, vocab_size: int
) -> ControlState:
    """Makes the controls of empty rows.

    Args:
      spec: what the loop carries.
      batch: rows.
      size: length of a row's token buffer, L.
      vocab_size: V.

    Returns:
      Controls that change nothing.
    """
    penalties = None
    if spec.penalties:
        penalties = Penalties(
            repetition=jnp.ones((batch,), jnp.float32),
            presence=jnp.zeros((batch,), jnp.float32),
            frequency=jnp.zeros((batch,), jnp.float32),
            in_prompt=jnp.zeros((batch, vocab_size), bool),
            counts=jnp.zeros((batch, vocab_size), jnp.int32),
        )
    mask = None
    if spec.n_mask_states:
        mask = MaskState(
            state=jnp.full((batch,), UNCONSTRAINED, jnp.int32),
            transitions=jnp.full((spec.n_mask_states, vocab_size), -1, jnp.int32),
        )
    return ControlState(
        penalties=penalties,
        bias=jnp.zeros((batch, vocab_size), jnp.float32) if spec.bias else None,
        forced=jnp.full((batch, size), -1, jnp.int32) if spec.forced else None,
        min_length=jnp.zeros((batch,), jnp.int32) if spec.min_new else None,
        mask=mask,
    )


def apply_controls(
    logits: Float[Array, "B W V"],
    controls: ControlState,
    *,
    tokens: Int[Array, "B N"],
    length: Int[Array, " B"],
    stop_ids: Int[Array, "B S"],
    parents: Int[Array, "B N"] | None = None,
) -> Float[Array, "B W V"]:
    """Applies every row's controls to the logits of a pass.

    Args:
      logits: float32; row i scores the token that follows row i.
      controls: of each batch row.
      tokens: the drafts of the pass, N = W - 1, ids inside the vocabulary.
      length: committed tokens of each batch row, the pending one included.
      stop_ids: ids that end a batch row, -1 for none.
      parents: for each draft the draft it follows, -1 for the pending token, parents
        first; None is a chain.

    Returns:
      The controlled logits, -inf where a token may not be emitted. A row below a
      draft that may not be emitted itself is not constrained: no rule reaches it.
    """
    if parents is None:
        n_rows = logits.shape[1]
        mask, offsets = np.tri(n_rows, dtype=bool), np.arange(n_rows)
        layout = PassLayout(mask[None], offsets[None])
    else:
        layout = pass_layout(tree_arrays(parents))
    token = lax.broadcasted_iota(jnp.int32, (1, 1, logits.shape[2]), 2)
    position = length[:, None] + jnp.asarray(layout.offsets)
    if controls.bias is not None:
        logits = logits + controls.bias[:, None, :]
    if controls.penalties is not None:
        n_drafted = _drafted(tokens, layout.mask, token)
        logits = _penalize(logits, controls.penalties, n_drafted)
    if controls.forced is not None:
        # A position beyond the buffer is never committed; fill, do not clamp.
        forced = jnp.take_along_axis(
            controls.forced, position, axis=1, mode="fill", fill_value=-1
        )[..., None]
        logits = jnp.where(
            forced < 0, logits, jnp.where(token == forced, 0.0, -jnp.inf)
        )
    if controls.min_length is not None:
        early = (position < controls.min_length[:, None])[..., None]
        for i in range(stop_ids.shape[1]):
            stops = token == stop_ids[:, i, None, None]
            logits = jnp.where(early & stops, -jnp.inf, logits)
    if controls.mask is not None:
        state = _mask_states(controls.mask, tokens, parents)
        allowed = controls.mask.transitions[jnp.maximum(state, 0)] >= 0
        logits = jnp.where(allowed | (state < 0)[..., None], logits, -jnp.inf)
    return logits


def advance_controls(
    controls: ControlState,
    emitted: Int[Array, "B W"],
    n_committed: Int[Array, " B"],
) -> ControlState:
    """Moves the controls over the tokens that a pass committed.

    Args:
      controls: before the pass.
      emitted: the tokens a pass may commit, in order.
      n_committed: how many of them it did.

    Returns:
      The controls after the pass.
    """
    batch, width = emitted.shape
    if controls.penalties is not None:
        counts = controls.penalties.counts
        kept = jnp.arange(width)[None, :] < n_committed[:, None]
        rows = jnp.arange(batch)[:, None]
        # What is not committed points past the end, where "drop" ignores it.
        at = jnp.where(kept, emitted, counts.shape[1])
        counts = counts.at[rows, at].add(1, mode="drop")
        penalties = controls.penalties._replace(counts=counts)
        controls = controls._replace(penalties=penalties)
    if controls.mask is not None:
        state = _mask_states(controls.mask, emitted, None)
        state = jnp.take_along_axis(state, n_committed[:, None], axis=1)[:, 0]
        controls = controls._replace(mask=controls.mask._replace(state=state))
    return controls


def _drafted(
    tokens: Int[Array, "B N"], mask: Array | np.ndarray, token: Int[Array, "1 1 V"]
) -> Int[Array, "B W V"] | None:
    """Counts each token among the drafts on a row's path, itself included.

    Compares instead of scattering: the count stays a term of the elementwise
    arithmetic that uses it, in one pass over the logits, and on a vocabulary that is
    split over devices it needs no communication.
    """
    total = None
    for draft in range(tokens.shape[1]):
        here = jnp.asarray(mask[..., draft + 1])[..., None]
        hit = (here & (token == tokens[:, draft, None, None])).astype(jnp.int32)
        total = hit if total is None else total + hit
    return total


def _penalize(
    logits: Float[Array, "B W V"],
    penalties: Penalties,
    n_drafted: Int[Array, "B W V"] | None,
) -> Float[Array, "B W V"]:
    per_row = lambda x: x[:, None, None]
    counts = penalties.counts[:, None, :]
    if n_drafted is not None:
        counts = counts + n_drafted
    seen = penalties.in_prompt[:, None, :] | (counts > 0)
    factor = per_row(penalties.repetition)
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(seen, repeated, logits)
    logits = logits - per_row(penalties.frequency) * counts.astype(jnp.float32)
    return logits - jnp.where(counts > 0, per_row(penalties.presence), 0.0)


def _mask_states(
    mask: MaskState, tokens: Int[Array, "B N"], parents: Int[Array, "B N"] | None
) -> Int[Array, "B W"]:
    """Returns the constraint's state at each row of a pass.

    ``UNCONSTRAINED`` where there is none, and below a token that is not allowed.
    """
    states = [mask.state]
    for draft in range(tokens.shape[1]):
        state = states[draft]
        if parents is not None:
            at = parents[:, draft, None] + 1
            state = jnp.take_along_axis(jnp.stack(states, 1), at, axis=1)[:, 0]
        after = mask.transitions[jnp.maximum(state, 0), tokens[:, draft]]
        states.append(jnp.where(state < 0, state, after))
    return jnp.stack(states, axis=1)
