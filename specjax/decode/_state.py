"""What a decode loop carries: one slot a batch row."""

import enum
from typing import Any, NamedTuple

import flax.struct
import jax.numpy as jnp
import numpy as np

from specjax.drafters import Drafter
from specjax.models import CACHE_SLACK, Target
from specjax.sampling import ControlSpec, ControlState, Settings, init_controls
from specjax.typing import Array, Float, Int


class Status(enum.IntEnum):
    """What a slot is doing."""

    EMPTY = 0
    RUNNING = 1
    STOPPED = 2  # a stop id was committed
    LENGTH = 3  # the limit was reached
    ERROR = 4  # the target's logits were not finite
    DEAD_END = 5  # the row's controls left no token


class Origin(enum.IntEnum):
    """Where a token came from."""

    PROMPT = 0
    PLAIN = 1  # nothing was drafted in its pass
    ACCEPTED = 2  # a draft the rule kept
    CORRECTION = 3  # the rule's token after a rejected draft
    BONUS = 4  # the rule's token after a fully accepted draft


class RowStats(NamedTuple):
    """Counters of a slot since its prompt was inserted. [B] int32 unless noted.

    Attributes:
      passes: target passes the row took part in while it was running.
      wide_passes: those of them wider than one row.
      verified: draft tokens the target scored for the row.
      accepted: draft tokens the rule kept, before truncation by stop ids or limit.
      committed: tokens appended to the row's text.
      verified_at: drafts scored at each draft position, [B, G].
      reached_at: those of them whose predecessors were all kept, [B, G].
      accepted_at: drafts kept at each draft position, [B, G].
    """

    passes: Int[Array, " B"]
    wide_passes: Int[Array, " B"]
    verified: Int[Array, " B"]
    accepted: Int[Array, " B"]
    committed: Int[Array, " B"]
    verified_at: Int[Array, "B G"]
    reached_at: Int[Array, "B G"]
    accepted_at: Int[Array, "B G"]


class TopTokens(NamedTuple):
    """The most probable tokens of each position, most probable first.

    Attributes:
      ids: [B, L, K] int32.
      logprobs: natural log, under the target's own law. [B, L, K] float32
    """

    ids: Int[Array, "B L K"]
    logprobs: Float[Array, "B L K"]


class DecodeState(flax.struct.PyTreeNode, kw_only=True):
    """State of a batch of slots.

    Attributes:
      tokens: prompt and output of each row; junk beyond ``length``. [B, L] int32
      logprobs: log-probability (natural log) of each output token under the
        target's own law, before the warp. [B, L] float32
      origin: ``Origin`` of each token. [B, L] int8
      top: alternatives to each output token, or None.
      length: committed tokens of each row, the pending one included. [B]
      prompt_length: tokens of the prompt. [B]
      limit: the row stops when ``length`` reaches this. [B]
      max_drafts: most drafts a pass verifies for the row. [B]
      status: ``Status``. [B] int32
      settings: sampling settings.
      controls: what rows ask of their logits.
      stop_ids: ids that end a row when committed; -1 is none. [B, N]
      cache: the target's cache; its length is ``length - 1`` for running rows.
      draft: the drafter's state.
      n_new: tokens the last pass committed. [B]
      stats: counters.
    """

    tokens: Int[Array, "B L"]
    logprobs: Float[Array, "B L"]
    origin: Int[Array, "B L"]
    top: TopTokens | None
    length: Int[Array, " B"]
    prompt_length: Int[Array, " B"]
    limit: Int[Array, " B"]
    max_drafts: Int[Array, " B"]
    status: Int[Array, " B"]
    settings: Settings
    controls: ControlState
    stop_ids: Int[Array, "B N"]
    cache: Any
    draft: Any
    n_new: Int[Array, " B"]
    stats: RowStats


def with_masks(state: DecodeState, transitions: np.ndarray) -> DecodeState:
    """Returns the state with the table of its rows' constraints filled in.

    Args:
      state: made for as many states of constraints as the table has.
      transitions: [Q, V] int32.
    """
    mask = state.controls.mask
    if mask is None or mask.transitions.shape != transitions.shape:
        raise ValueError(
            f"A table of shape {transitions.shape} does not fit the plan's "
            f"{None if mask is None else mask.transitions.shape}."
        )
    mask = mask._replace(transitions=jnp.asarray(transitions))
    return state.replace(controls=state.controls._replace(mask=mask))


def init_state(
    target: Target,
    drafter: Drafter,
    *,
    batch: int,
    capacity: int,
    n_stop_ids: int,
    controls: ControlSpec,
    n_top: int,
) -> DecodeState:
    """Makes a batch of empty slots.

    Args:
      target: the target.
      drafter: the drafter.
      batch: slots.
      capacity: most tokens a slot may hold.
      n_stop_ids: stop ids a row may have.
      controls: what rows may ask of their logits.
      n_top: alternatives kept for each output token.

    Returns:
      The state.
    """
    # As long as the cache, so that a prefill bucket's padding can be sliced.
    size = capacity + CACHE_SLACK
    zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
    levels = drafter.spec.n_levels
    stats = RowStats(
        passes=zeros(),
        wide_passes=zeros(),
        verified=zeros(),
        accepted=zeros(),
        committed=zeros(),
        verified_at=zeros(levels),
        reached_at=zeros(levels),
        accepted_at=zeros(levels),
    )
    top = None
    if n_top:
        top = TopTokens(
            zeros(size, n_top), jnp.zeros((batch, size, n_top), jnp.float32)
        )
    return DecodeState(
        tokens=zeros(size),
        logprobs=jnp.zeros((batch, size), jnp.float32),
        origin=jnp.zeros((batch, size), jnp.int8),
        top=top,
        length=zeros(),
        prompt_length=zeros(),
        limit=zeros(),
        max_drafts=zeros(),
        status=zeros(),
        settings=Settings.full(batch),
        controls=init_controls(
            controls, batch=batch, size=size, vocab_size=target.spec.vocab_size
        ),
        stop_ids=jnp.full((batch, n_stop_ids), -1, jnp.int32),
        cache=target.init_cache(batch, capacity),
        draft=drafter.init(batch, capacity),
        n_new=zeros(),
        stats=stats,
    )
