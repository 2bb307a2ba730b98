"""Continuous batching on slots: the host side of decoding.

Requests wait in a queue. A free slot takes the next one (prefill, then insert at that
row) whenever the loop returns to the host; nothing is recompiled and the other rows
do not notice. ``generate``, ``stream`` and the batch script are thin on this.
"""

import collections
import dataclasses
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

import jax
import numpy as np

from specjax.cache import check_capacity
from specjax.decode._compiled import Plan, Snapshot, prefill_chunks, programs
from specjax.decode._results import Completion, FinishReason, Stats
from specjax.decode._state import Status
from specjax.drafters import Drafter
from specjax.sampling import Settings, check_sampling, check_whole
from specjax.text import StopStringMatcher, TextStream
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

    def __post_init__(self) -> None:
        """Checks every value."""
        if not self.prompt_ids:
            raise ValueError(
                "The prompt is empty: it needs at least one token to go on from."
            )
        check_whole("max_new_tokens", self.max_new_tokens, 1, 2**31, "at least one")
        if isinstance(self.stop, str):
            raise TypeError(f"stop={self.stop!r} must be a list of strings.")
        StopStringMatcher(self.stop)
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


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


class Engine:
    """Decodes requests on a fixed number of slots.

    Attributes:
      plan: the static side of the loop.
    """

    def __init__(
        self,
        model: "Model",
        *,
        drafter: Drafter,
        rule: VerifyRule,
        batch_size: int,
        capacity: int,
        exact: bool = False,
        width: int | None = None,
        draft_params: Params | None = None,
        passes_per_call: int = PASSES_PER_CALL,
        n_stop_ids: int = 8,
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
          draft_params: the drafter's parameters, where it has any.
          passes_per_call: passes between two returns to the host.
          n_stop_ids: stop ids a request may have, the model's own included.

        Raises:
          ValueError: a size is out of range; the message has the numbers.
        """
        spec = model.target.spec
        if batch_size < 1 or passes_per_call < 1:
            raise ValueError(f"{batch_size=} and {passes_per_call=} must be >= 1.")
        if capacity > spec.max_context:
            raise ValueError(
                f"{capacity=} is more than the {spec.max_context} positions that "
                f"{model.name} is made for; lower it."
            )
        if width is not None and not exact:
            raise ValueError(f"{width=} only means something with exact=True.")
        gamma = drafter.spec.gamma
        full = gamma + 1 if width is None else width
        widths = (full,) if exact or full == 1 else (1, full)
        self.plan = Plan(
            target=model.target,
            drafter=drafter,
            rule=rule,
            batch=batch_size,
            capacity=capacity,
            widths=widths,
            exact=exact,
            n_stop_ids=n_stop_ids,
        )
        self._model = model
        self._draft_params = draft_params
        self._programs = programs(self.plan, passes_per_call)
        self._state = self._programs.init()
        self._slots: list[_Slot | None] = [None] * batch_size
        self._queue: collections.deque[Request] = collections.deque()

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
          ValueError: it does not fit a slot, has ids outside the vocabulary, or
            settings that the rule does not allow; or the model has no tokenizer.
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
        n_stop = len(self._stop_ids(request))
        if n_stop > self.plan.n_stop_ids:
            raise ValueError(
                f"{n_stop} stop ids do not fit n_stop_ids={self.plan.n_stop_ids}."
            )
        if self.plan.rule.greedy_only and request.temperature > 0:
            raise ValueError(
                f"rule {self.plan.rule.name!r} decodes at temperature 0; got "
                f"temperature={request.temperature}. Use 'coupled' or 'rejection'."
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

    def _stop_ids(self, request: Request) -> list[int]:
        own = () if request.ignore_eos else self._model.eos_ids
        return sorted({*own, *request.stop_ids})

    def _insert(self, row: int, request: Request) -> None:
        """Writes a request into a slot and prefills all but its last token."""
        n = len(request.prompt_ids)
        tokens = np.zeros((self._state.tokens.shape[1],), np.int32)
        tokens[:n] = request.prompt_ids
        stop_ids = np.full((self.plan.n_stop_ids,), -1, np.int32)
        own = self._stop_ids(request)
        stop_ids[: len(own)] = own
        settings = Settings.of_row(
            request.temperature,
            request.top_k,
            request.top_p,
            request.min_p,
            request.seed,
        )
        at = np.int32(row)
        limit = np.int32(n + request.max_new_tokens)
        self._state = self._programs.insert(
            self._state, at, tokens, np.int32(n), limit, stop_ids, settings
        )
        for size, n_real in prefill_chunks(n - 1):
            self._state = self._programs.prefill(
                self._model.params,
                self._draft_params,
                self._state,
                at,
                np.int32(n_real),
                size=size,
            )
        stream = TextStream(self._model.need_tokenizer(), request.stop)
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
    elif not stopped and status == Status.ERROR:
        reason = "error"
        position = len(slot.request.prompt_ids) + len(slot.ids)
        error = (
            f"The target's logits for position {position} (token {len(slot.ids)} of "
            "the output) are not finite."
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
    )
