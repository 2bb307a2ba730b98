"""Request settings on logits: the host side of ``sampling.apply_controls``."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.sampling import (
    UNCONSTRAINED,
    ControlSpec,
    ControlState,
    MaskState,
    Penalties,
    advance_controls,
    check_whole,
)
from specjax.text import TokenMask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Controls:
    """What a request asks of its logits before temperature and filters.

    Everything is applied position by position, on drafted tokens too, so that
    speculation changes nothing. Returned log-probabilities are the target's own,
    before controls.

    Attributes:
      repetition_penalty: logits of tokens in the prompt or the output are divided by
        it where positive and multiplied where negative; 1 is off.
      presence_penalty: subtracted from the logits of tokens in the output; 0 is off.
      frequency_penalty: subtracted once for each time a token is in the output; 0 is
        off.
      logit_bias: added to the logits of these ids (natural-log units); -inf bans.
      banned_ids: ids that are never emitted.
      forced_ids: output position (0 is the first new token) -> id that stands there,
        whatever bias and bans say of it.
      min_new_tokens: no stop id, and no stop string, before this many tokens.
      token_mask: finite-state constraint that the output obeys.

    Raises:
      ValueError: a value is out of range; the message names it.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    banned_ids: tuple[int, ...] = ()
    forced_ids: Mapping[int, int] = dataclasses.field(default_factory=dict)
    min_new_tokens: int = 0
    token_mask: TokenMask | None = None

    def __post_init__(self) -> None:
        """Checks every value."""
        factor = self.repetition_penalty
        if not (_is_float32(factor) and factor > 0):
            raise ValueError(
                f"repetition_penalty={factor} must be a finite number > 0 (1 is off)."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not _is_float32(value := getattr(self, name)):
                raise ValueError(f"{name}={value} must be finite (0 is off).")
        for token, value in self.logit_bias.items():
            check_whole("logit_bias id", token, 0, 2**31, "a token id")
            if value != -math.inf and not _is_float32(value):
                raise ValueError(
                    f"logit_bias[{token}]={value} must be finite, or -inf to ban the "
                    "token; use forced_ids or a token_mask to require tokens."
                )
        for token in self.banned_ids:
            check_whole("banned_ids", token, 0, 2**31, "token ids")
        for position, token in self.forced_ids.items():
            check_whole("forced_ids position", position, 0, 2**31, "0 is the first")
            check_whole(f"forced_ids[{position}]", token, 0, 2**31, "a token id")
        check_whole("min_new_tokens", self.min_new_tokens, 0, 2**31, "0 is off")

    @property
    def spec(self) -> ControlSpec:
        """The controls that a decode loop must carry for this request."""
        mask = self.token_mask
        return ControlSpec(
            penalties=self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0,
            bias=bool(self.logit_bias or self.banned_ids),
            forced=bool(self.forced_ids),
            min_new=self.min_new_tokens > 0,
            n_mask_states=0 if mask is None else mask.n_states,
        )

    def check(self, vocab_size: int, max_new_tokens: int) -> None:
        """Checks the controls against a model and a request's length.

        Raises:
          ValueError: an id is outside the vocabulary, or a position beyond the output.
        """
        ids = {
            "logit_bias": self.logit_bias,
            "banned_ids": self.banned_ids,
            "forced_ids": self.forced_ids.values(),
        }
        for name, values in ids.items():
            for token in values:
                if token >= vocab_size:
                    raise ValueError(
                        f"{name} holds id {token}, outside the vocabulary "
                        f"[0, {vocab_size})."
                    )
        late = [at for at in self.forced_ids if at >= max_new_tokens]
        if late:
            raise ValueError(
                f"forced_ids has output position {max(late)}, beyond "
                f"max_new_tokens={max_new_tokens}."
            )
        if self.min_new_tokens > max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than "
                f"max_new_tokens={max_new_tokens}."
            )


def _is_float32(value: float) -> bool:
    """Whether a number is finite and stays so, and above 0 where it is, on a device."""
    with np.errstate(over="ignore", under="ignore"):
        number = np.float32(value)
    return bool(np.isfinite(number)) and (number == 0) == (value == 0)


#: Controls that change nothing.
NO_CONTROLS = Controls()


class MaskTable:
    """The constraints that a decode loop serves, as one table.

    Attributes:
      masks: the constraints.
      transitions: their tables below one another, states renumbered, padded to a
        power of two so that few shapes compile; [Q, V] int32, or None.
    """

    def __init__(self, masks: Sequence[TokenMask], vocab_size: int) -> None:
        """Stacks the tables.

        Args:
          masks: each once.
          vocab_size: ids of the model.

        Raises:
          ValueError: a constraint is over another vocabulary.
        """
        for mask in masks:
            if mask.vocab_size != vocab_size:
                raise ValueError(
                    f"token_mask {mask.name!r} is over {mask.vocab_size} ids and the "
                    f"model has {vocab_size}; build it with vocab_size={vocab_size}."
                )
        self.masks = tuple(masks)
        self._first: dict[int, int] = {}
        self.transitions: np.ndarray | None = None
        tables, n = [], 0
        for mask in self.masks:
            self._first[id(mask)] = n
            table = mask.transitions
            tables.append(np.where(table >= 0, table + np.int32(n), np.int32(-1)))
            n += mask.n_states
        if tables:
            rest = (1 << (n - 1).bit_length()) - n
            tables.append(np.full((rest, tables[0].shape[1]), -1, np.int32))
            self.transitions = np.concatenate(tables)

    @property
    def n_states(self) -> int:
        """Rows of the table."""
        return 0 if self.transitions is None else len(self.transitions)

    def start(self, mask: TokenMask | None) -> int:
        """Returns a constraint's first state in the table.

        Raises:
          ValueError: the constraint is not in the table.
        """
        if mask is None:
            return UNCONSTRAINED
        if id(mask) not in self._first:
            raise ValueError(
                f"token_mask {mask.name!r} is not among the {len(self.masks)} of this "
                "engine; pass it as Engine(token_masks=...)."
            )
        return self._first[id(mask)] + mask.start


def union_spec(controls: Sequence[Controls]) -> ControlSpec:
    """Returns what a loop must carry to serve all of some controls, masks aside."""
    specs = [c.spec for c in controls]
    return ControlSpec(
        penalties=any(s.penalties for s in specs),
        bias=any(s.bias for s in specs),
        forced=any(s.forced for s in specs),
        min_new=any(s.min_new for s in specs),
    )


def union_masks(controls: Sequence[Controls]) -> tuple[TokenMask, ...]:
    """Returns the distinct constraints of some controls."""
    masks = {id(c.token_mask): c.token_mask for c in controls if c.token_mask}
    return tuple(masks.values())


def row_controls(
    controls: Controls,
    spec: ControlSpec,
    *,
    prompt_ids: Sequence[int],
    size: int,
    vocab_size: int,
    mask_start: int,
) -> ControlState:
    """Makes one row's controls on the host.

    Args:
      controls: the request's.
      spec: what the loop carries; it covers the request's.
      prompt_ids: the prompt.
      size: length of a row's token buffer.
      vocab_size: V.
      mask_start: first state of the row's constraint, or ``UNCONSTRAINED``.

    Returns:
      A ``ControlState`` of numpy values without the batch axis and the table.
    """
    n = len(prompt_ids)
    # Host values: they become device arrays, with the batch axis, when inserted.
    row: dict[str, Any] = {}
    if spec.penalties:
        in_prompt = np.zeros((vocab_size,), bool)
        in_prompt[list(prompt_ids)] = True
        penalties: dict[str, Any] = dict(
            repetition=np.float32(controls.repetition_penalty),
            presence=np.float32(controls.presence_penalty),
            frequency=np.float32(controls.frequency_penalty),
            in_prompt=in_prompt,
            counts=np.zeros((vocab_size,), np.int32),
        )
        row["penalties"] = Penalties(**penalties)
    if spec.bias:
        bias = np.zeros((vocab_size,), np.float32)
        for token, value in controls.logit_bias.items():
            bias[token] = value
        bias[list(controls.banned_ids)] = -np.inf
        row["bias"] = bias
    if spec.forced:
        forced = np.full((size,), -1, np.int32)
        for position, token in controls.forced_ids.items():
            forced[n + position] = token
        row["forced"] = forced
    if spec.min_new:
        row["min_length"] = np.int32(n + controls.min_new_tokens)
    if spec.n_mask_states:
        mask: dict[str, Any] = dict(state=np.int32(mask_start), transitions=None)
        row["mask"] = MaskState(**mask)
    return ControlState(**row)


def controls_after(
    controls: Controls,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    vocab_size: int,
) -> ControlState:
    """Makes the controls of one row as they stand after some output.

    Args:
      controls: the request's.
      prompt_ids: the prompt.
      output_ids: what was generated.
      vocab_size: V.

    Returns:
      Controls of a batch of one.
    """
    table = MaskTable(union_masks([controls]), vocab_size)
    row = row_controls(
        controls,
        controls.spec,
        prompt_ids=prompt_ids,
        size=len(prompt_ids) + max([len(output_ids), *controls.forced_ids]) + 1,
        vocab_size=vocab_size,
        mask_start=table.start(controls.token_mask),
    )
    state = jax.tree.map(lambda x: jnp.asarray(x)[None], row)
    if table.transitions is not None:
        assert state.mask is not None
        mask = state.mask._replace(transitions=jnp.asarray(table.transitions))
        state = state._replace(mask=mask)
    for token in output_ids:
        one = jnp.full((1, 1), token, jnp.int32)
        state = advance_controls(state, one, jnp.ones((1,), jnp.int32))
    return state
