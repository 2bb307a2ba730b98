"""Continuous batching on slots: the host side of decoding.

Requests wait in a queue. A free slot takes the next one (prefill, then insert at that
row) whenever the loop returns to the host; nothing is recompiled and the other rows
do not notice. ``generate``, ``stream`` and the batch script are thin on this.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from specjax.cache import check_capacity
from specjax.decode._compiled import Plan, Snapshot, prefill_chunks, programs
from specjax.decode._controls import NO_CONTROLS, Controls, MaskTable, row_controls
from specjax.decode._pairing import pair
from specjax.decode._results import Completion, FinishReason, Stats
from specjax.decode._state import DecodeState, Status, with_masks
from specjax.drafters import BoundDrafter, Drafter, unbind
from specjax.sampling import ControlSpec, Settings, check_sampling, check_whole
from specjax.text import StopStringMatcher, TextStream, TokenMask
from specjax.typing import Params
from specjax.verify import VerifyRule

if TYPE_CHECKING:
    from specjax.weights import Model

#: Passes a host call makes at most.
PASSES_PER_CALL = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to generate. Checked when it is made, before any work.

    Attributes:
      prompt_ids: the prompt, at least one id.
      id: anything that tells requests apart.
      max_new_tokens: most ids to generate, at least 1.
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      seed: of this request's random numbers, in [0, 2**32).
      stop: strings that end the text; they are not part of it.
      stop_ids: ids that end the sequence besides the model's own; they are part of
        the ids.
      ignore_eos: do not stop at the model's own end ids.
      controls: penalties, bias, constraints.
      top_logprobs: alternatives to report for each id.
      max_drafts: most drafts that a pass verifies for this request; 0 is plain
        decoding, None what the drafter likes.

    Raises:
      TypeError: ``stop`` is one string, or holds something else than strings.
      ValueError: a value is out of range; the message names it.
    """

    prompt_ids: tuple[int, ...]
    id: Hashable = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    controls: Controls = NO_CONTROLS
    top_logprobs: int = 0
    max_drafts: int | None = None

    def __post_init__(self) -> None:
        """Checks every value."""
        if not self.prompt_ids:
            raise ValueError(
                "The prompt is empty: it needs at least one token to go on from."
            )
        check_whole("max_new_tokens", self.max_new_tokens, 1, 2**31, "at least one")
        check_whole("top_logprobs", self.top_logprobs, 0, 2**31, "0 is none")
        if self.max_drafts is not None:
            check_whole("max_drafts", self.max_drafts, 0, 2**31, "0 is plain decoding")
        if isinstance(self.stop, str):
            raise TypeError(f"stop={self.stop!r} must be a list of strings.")
        StopStringMatcher(self.stop)
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


def stop_ids(model: "Model", request: Request) -> list[int]:
    """Returns the ids that end a request's sequence."""
    own = () if request.ignore_eos else model.eos_ids
    return sorted({*own, *request.stop_ids})


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one request after a step.

    Attributes:
      id: the request's.
      text: text that became final since the last event.
      n_new: ids committed since then (before a stop string trims them).
      completion: the finished sequence, or None while it goes on.
    """

    id: Hashable
    text: str
    n_new: int
    completion: Completion | None


@dataclasses.dataclass
class _Slot:
    """Host side of an occupied slot."""

    request: Request
    stream: TextStream
    seen: int
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    origins: list[int] = dataclasses.field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)


class Engine:
    """Decodes requests on a fixed number of slots.

    Attributes:
      plan: the static side of the loop.
    """

    def __init__(
        self,
        model: "Model",
        *,
        drafter: Drafter | BoundDrafter,
        rule: VerifyRule,
        batch_size: int,
        capacity: int,
        exact: bool = False,
        width: int | None = None,
        draft_params: Params | None = None,
        passes_per_call: int = PASSES_PER_CALL,
        n_stop_ids: int = 8,
        controls: ControlSpec | None = None,
        token_masks: Sequence[TokenMask] = (),
        n_top: int = 0,
    ) -> None:
        """Allocates the slots; programs compile when they are first needed.

        Args:
          model: target, parameters, tokenizer.
          drafter: the drafter.
          rule: the verify rule.
          batch_size: slots.
          capacity: most tokens a slot may hold: prompt + new tokens + width.
          exact: make ids identical with speculation on and off (under ``greedy`` and
            ``coupled``): every pass has ``width`` rows, in arithmetic that does not
            depend on the number of rows.
          width: rows of a pass when exact; None is gamma + 1.
          draft_params: the drafter's parameters, where it has any and does not bring
            them.
          passes_per_call: passes between two returns to the host.
          n_stop_ids: stop ids a request may have, the model's own included.
          controls: controls that requests may use, ``token_masks`` aside; None is
            none. What is not named here costs nothing.
          token_masks: constraints that requests may use.
          n_top: alternatives that requests may ask for.

        Raises:
          ValueError: a size is out of range; the message has the numbers. Or the
            drafter does not go with the rule.
        """
        spec = model.target.spec
        drafter, draft_params = unbind(drafter, draft_params)
        drafter = pair(drafter, rule, model.target, exact=exact)
        if batch_size < 1 or passes_per_call < 1:
            raise ValueError(f"{batch_size=} and {passes_per_call=} must be >= 1.")
        if capacity > spec.max_context:
            raise ValueError(
                f"{capacity=} is more than the {spec.max_context} positions that "
                f"{model.name} is made for; lower it."
            )
        if width is not None and not exact:
            raise ValueError(f"{width=} only means something with exact=True.")
        if not 0 <= n_top <= spec.vocab_size:
            raise ValueError(f"{n_top=} must be in [0, {spec.vocab_size}].")
        gamma = drafter.spec.gamma
        full = gamma + 1 if width is None else width
        # A pass of each width is compiled; which one runs is chosen on the device.
        bank = {1, *(n + 1 for n in drafter.spec.bank if n < gamma), full}
        widths = (full,) if exact else tuple(sorted(bank))
        self._masks = MaskTable(token_masks, spec.vocab_size)
        self.plan = Plan(
            target=model.target,
            drafter=drafter,
            rule=rule,
            batch=batch_size,
            capacity=capacity,
            widths=widths,
            exact=exact,
            n_stop_ids=n_stop_ids,
            controls=(controls or ControlSpec())._replace(
                n_mask_states=self._masks.n_states
            ),
            n_top=n_top,
            n_ids=model.n_ids,
        )
        self._model = model
        self._draft_params = draft_params
        self._programs = programs(self.plan, passes_per_call)
        self._state = self._programs.init()
        if self._masks.transitions is not None:
            self._state = with_masks(self._state, self._masks.transitions)
        self._slots: list[_Slot | None] = [None] * batch_size
        self._queue: collections.deque[Request] = collections.deque()
        # The prompt whose keys and values stand in each slot's cache.
        self._cached: list[tuple[int, ...] | None] = [None] * batch_size

    @property
    def state(self) -> DecodeState:
        """The slots on the device, for tests and tools; the next step donates them."""
        return self._state

    @property
    def busy(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self._queue) or self.n_running > 0

    @property
    def n_running(self) -> int:
        """Slots in use."""
        return sum(slot is not None for slot in self._slots)

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def check(self, request: Request) -> None:
        """Checks that a request can be served.

        Raises:
          ValueError: it does not fit a slot, has ids outside the vocabulary, settings
            that the rule does not allow, or controls that the engine does not carry;
            or the model has no tokenizer.
        """
        self._model.need_tokenizer()
        check_capacity(
            prompt_length=len(request.prompt_ids),
            max_new_tokens=request.max_new_tokens,
            gamma=self.plan.widths[-1] - 1,
            capacity=self.plan.capacity,
        )
        vocab = self.plan.target.spec.vocab_size
        for name in ("prompt_ids", "stop_ids"):
            bad = [i for i in getattr(request, name) if not 0 <= i < vocab]
            if bad:
                raise ValueError(
                    f"{name} holds {bad[0]}, outside the vocabulary [0, {vocab})."
                )
        n_stop = len(stop_ids(self._model, request))
        if n_stop > self.plan.n_stop_ids:
            raise ValueError(
                f"{n_stop} stop ids do not fit n_stop_ids={self.plan.n_stop_ids}."
            )
        self._check_controls(request)
        if self.plan.rule.greedy_only and request.temperature > 0:
            raise ValueError(
                f"rule {self.plan.rule.name!r} decodes at temperature 0; got "
                f"temperature={request.temperature}. Use 'coupled' or 'rejection'."
            )

    def _check_controls(self, request: Request) -> None:
        controls, carried = request.controls, self.plan.controls
        controls.check(self.plan.target.spec.vocab_size, request.max_new_tokens)
        self._masks.start(controls.token_mask)
        wanted = controls.spec._replace(n_mask_states=0)
        if not carried.covers(wanted):
            rows = zip(wanted._fields, carried, wanted, strict=True)
            missing = [name for name, mine, theirs in rows if theirs > mine]
            raise ValueError(
                f"The request uses {', '.join(missing)}, which this engine does not "
                f"carry; make it with Engine(controls=ControlSpec({missing[0]}=True))."
            )
        if request.top_logprobs > self.plan.n_top:
            raise ValueError(
                f"top_logprobs={request.top_logprobs} is more than the engine's "
                f"n_top={self.plan.n_top}."
            )

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue.

        Raises:
          ValueError: see ``check``.
        """
        self.check(request)
        self._queue.append(request)

    def admit(self) -> None:
        """Moves waiting requests into free slots and starts their prefill."""
        for row, slot in enumerate(self._slots):
            if slot is None and self._queue:
                self._insert(row, self._queue.popleft())

    def wait(self) -> None:
        """Blocks until what was asked of the device so far is done."""
        jax.block_until_ready(self._state)

    def step(self) -> list[Event]:
        """Fills free slots, runs some passes, and reports what came of them."""
        self.admit()
        if not self.n_running:
            return []
        start = np.asarray([s.seen if s else 0 for s in self._slots], np.int32)
        # A new row's first token is not kept waiting for a whole call.
        fresh = any(s is not None and not s.ids for s in self._slots)
        n = np.int32(1 if fresh else self._programs.n_passes)
        self._state, snapshot = self._programs.run(
            self._model.params, self._draft_params, self._state, start, n
        )
        snapshot = jax.device_get(snapshot)
        events = []
        for row, slot in enumerate(self._slots):
            if slot is not None:
                events.append(self._collect(row, slot, snapshot))
        return events

    def run(self, requests: Iterable[Request] = ()) -> Iterable[Event]:
        """Submits requests and steps until nothing is left, giving every event."""
        for request in requests:
            self.submit(request)
        while self.busy:
            yield from self.step()

    def _insert(self, row: int, request: Request) -> None:
        """Writes a request into a slot and prefills all but its last token."""
        n = len(request.prompt_ids)
        tokens = np.zeros((self._state.tokens.shape[1],), np.int32)
        tokens[:n] = request.prompt_ids
        own = stop_ids(self._model, request)
        stops = np.full((self.plan.n_stop_ids,), -1, np.int32)
        stops[: len(own)] = own
        settings = Settings.of_row(
            request.temperature,
            request.top_k,
            request.top_p,
            request.min_p,
            request.seed,
        )
        controls = row_controls(
            request.controls,
            self.plan.controls,
            prompt_ids=request.prompt_ids,
            size=len(tokens),
            vocab_size=self.plan.target.spec.vocab_size,
            mask_start=self._masks.start(request.controls.token_mask),
        )
        at = np.int32(row)
        limit = np.int32(n + request.max_new_tokens)
        gamma = self.plan.drafter.spec.gamma
        # A slot's prompt stays in its cache while it decodes and after, so samples of
        # one prompt share one prefill.
        shared = self.plan.drafter.copy_row and request.prompt_ids in self._cached
        source = self._cached.index(request.prompt_ids) if shared else row
        self._state = self._programs.insert(
            self._state,
            at,
            tokens,
            np.int32(n),
            limit,
            np.int32(gamma if request.max_drafts is None else request.max_drafts),
            stops,
            settings,
            controls,
            np.int32(source),
            np.int32(n - 1 if shared else 0),
        )
        self._cached[row] = request.prompt_ids
        for size, n_real in [] if shared else prefill_chunks(n - 1):
            self._state = self._programs.prefill(
                self._model.params,
                self._draft_params,
                self._state,
                at,
                np.int32(n_real),
                size=size,
            )
        stream = TextStream(
            self._model.need_tokenizer(),
            request.stop,
            min_tokens=request.controls.min_new_tokens,
        )
        self._slots[row] = _Slot(request=request, stream=stream, seen=n)

    def _collect(self, row: int, slot: _Slot, snapshot: Snapshot) -> Event:
        """Reads a slot's new tokens and finishes it where it ended."""
        length = int(snapshot.length[row])
        cut = slice(slot.seen - int(snapshot.start[row]), None)
        n_new = length - slot.seen
        ids = snapshot.tokens[row][cut][:n_new].tolist()
        slot.ids += ids
        slot.logprobs += snapshot.logprobs[row][cut][:n_new].tolist()
        slot.origins += snapshot.origin[row][cut][:n_new].tolist()
        if (n_top := slot.request.top_logprobs) and snapshot.top is not None:
            ids_at, logprobs_at = (x[row][cut][:n_new, :n_top] for x in snapshot.top)
            slot.top += [
                tuple(zip(i, lp, strict=True))
                for i, lp in zip(ids_at.tolist(), logprobs_at.tolist(), strict=True)
            ]
        slot.seen = length
        text = slot.stream.push(ids)
        status = Status(int(snapshot.status[row]))
        if status == Status.RUNNING and not slot.stream.finished:
            return Event(slot.request.id, text, n_new, None)
        if not slot.stream.finished:
            text += slot.stream.flush()
        if status == Status.RUNNING:
            self._state = self._programs.release(self._state, np.int32(row))
        self._slots[row] = None
        stats = Stats.of_row(snapshot.stats, row)
        completion = _finish(slot, status, stats)
        return Event(slot.request.id, text, n_new, completion)


def _finish(slot: _Slot, status: Status, stats: Stats) -> Completion:
    """Trims ids, log-probabilities and text alike and names the reason."""
    stopped = slot.stream.stop is not None
    n = slot.stream.n_tokens if stopped else len(slot.ids)
    error = None
    reason: FinishReason = "stop"
    if not stopped and status == Status.LENGTH:
        reason = "length"
    elif not stopped and status in (Status.ERROR, Status.DEAD_END):
        reason = "error"
        position = len(slot.request.prompt_ids) + len(slot.ids)
        where = f"position {position} (token {len(slot.ids)} of the output)"
        error = (
            f"The target's logits for {where} are not finite."
            if status == Status.ERROR
            else f"The request's controls leave no token for {where}: banned_ids, "
            "forced_ids, min_new_tokens and token_mask together exclude every one."
        )
    return Completion(
        id=slot.request.id,
        prompt_ids=slot.request.prompt_ids,
        ids=tuple(slot.ids[:n]),
        text=slot.stream.text,
        logprobs=tuple(slot.logprobs[:n]),
        origins=tuple(slot.origins[:n]),
        finish_reason=reason,
        error=error,
        stats=stats,
        top_logprobs=tuple(slot.top[:n]),
    )
