"""From a record of the prompt file to requests, turn by turn, and back."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specjax.batch._constraints import Constraints
from specjax.batch._errors import UsageError
from specjax.batch._settings import (
    CONSTRAINTS,
    REQUEST,
    BatchSettings,
    check_sampling_settings,
)
from specjax.decode import (
    Completion,
    Controls,
    Request,
    Stats,
    encode_prompt,
    fit_capacity,
    union_spec,
)
from specjax.sampling import ControlSpec
from specjax.text import BadRecord, Record, TokenMask

if TYPE_CHECKING:
    from specjax.weights import Model

# Stands for an answer that is not there yet when a conversation's length is bounded.
# Not empty, since templates may treat an empty message differently.
_STAND_IN = "ok"


@dataclasses.dataclass
class Job:
    """One sample of a record being worked on.

    Attributes:
      record: the record.
      sampling: the run's sampling settings, with the record's own over them.
      controls: those of them that change logits.
      sample: number of the sample, from 0.
      completions: its finished turns.
      error: why it ended before its end, or None.
    """

    record: Record
    sampling: dict[str, Any]
    controls: Controls
    sample: int = 0
    completions: list[Completion] = dataclasses.field(default_factory=list)
    error: str | None = None

    @property
    def answered(self) -> bool:
        """Whether every turn has been answered."""
        return len(self.completions) == len(self.record.turns)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.answered or self.error is not None

    @property
    def seed(self) -> int:
        """The sample's seed, as ``generate`` counts them up."""
        return (self.sampling["seed"] + self.sample) % 2**32


@dataclasses.dataclass(frozen=True)
class Needs:
    """What an engine must have for all records of a file.

    Attributes:
      capacity: tokens a slot must hold.
      controls: controls that the records use, constraints aside.
      token_masks: their constraints.
    """

    capacity: int
    controls: ControlSpec
    token_masks: tuple[TokenMask, ...]


class Preparer:
    """Makes jobs and requests for a model under some settings.

    Attributes:
      constraints: the constraints seen so far.
    """

    def __init__(self, model: "Model", settings: BatchSettings, width: int) -> None:
        """Takes what the requests depend on.

        Args:
          model: tokenizer and chat template.
          settings: the run's.
          width: rows of the widest pass, which a slot needs beyond its tokens.

        Raises:
          UsageError: the run's controls do not go with the model.
        """
        self._model = model
        self._settings = settings
        self._width = width
        self.constraints = Constraints(model, ignore_eos=settings.ignore_eos)
        try:
            self.constraints.controls(settings.sampling)
        except ValueError as error:
            raise UsageError(f"flags: {error}") from error

    def job(self, record: Record) -> Job:
        """Starts on a record.

        Raises:
          ValueError: a setting is refused, or it has several turns without a chat
            template.
        """
        own = check_sampling_settings(record.settings, "settings")
        if len(record.turns) > 1:
            why = None
            if self._settings.chat is False:
                why = "--nochat was given"
            elif self._model.chat_template is None:
                why = f"{self._model.name} has none"
            if why is not None:
                raise ValueError(
                    f"the record has {len(record.turns)} turns, which needs a chat "
                    f"template, and {why}"
                )
        sampling = self._settings.sampling
        if own.keys() & set(CONSTRAINTS):
            sampling.update(dict.fromkeys(CONSTRAINTS))
        sampling.update(own)
        try:
            controls = self.constraints.controls(sampling)
        except ValueError as error:
            raise ValueError(f"settings: {error}") from error
        return Job(record, sampling, controls)

    def samples(self, job: Job) -> list[Job]:
        """Returns a job for each sample of a job's record."""
        return [
            Job(job.record, job.sampling, job.controls, sample)
            for sample in range(self._settings.n_samples)
        ]

    def request(self, job: Job) -> Request:
        """Makes the request of a job's next turn.

        Raises:
          ValueError: the prompt or a setting is refused.
        """
        answers = [completion.text for completion in job.completions]
        return Request(
            prompt_ids=self._encode(job.record, answers),
            id=(job.record.line, job.sample),
            ignore_eos=self._settings.ignore_eos,
            controls=job.controls,
            top_logprobs=self._settings.top_logprobs,
            **{**{name: job.sampling[name] for name in REQUEST}, "seed": job.seed},
        )

    def need(self, job: Job) -> int:
        """Returns the slots of cache that a job needs at most.

        A conversation's earlier answers are counted at their greatest length.

        Raises:
          ValueError: the prompt is refused.
        """
        n_turns = len(job.record.turns)
        n_prompt = len(self._encode(job.record, [_STAND_IN] * (n_turns - 1)))
        return n_prompt + n_turns * job.sampling["max_new_tokens"] + self._width

    def check_fits(self, job: Job, capacity: int) -> None:
        """Checks that all turns of a job fit a slot.

        Raises:
          ValueError: they do not; the message has the numbers.
        """
        need = self.need(job)
        if need <= capacity:
            return
        n_turns, n_new = len(job.record.turns), job.sampling["max_new_tokens"]
        n_prompt = need - n_turns * n_new - self._width
        turns = "" if n_turns == 1 else f"{n_turns} turns of "
        context = self._model.target.spec.max_context
        remedy = "shorten the prompt or ask for fewer tokens"
        if need <= context:
            remedy = f"raise --capacity (up to {context}), {remedy}"
        raise ValueError(
            f"too long: it needs {need} cache slots (prompt {n_prompt} + {turns}"
            f"max_new_tokens {n_new} + a pass of {self._width}) and a row holds "
            f"{capacity}; {remedy}"
        )

    def needs(self, records: Iterable[Record | BadRecord]) -> Needs:
        """Returns what an engine must have for some records.

        Args:
          records: all of a file, in its order.

        Returns:
          The needs of those that can be served; the others get their error records
          when their turn comes.
        """
        context = self._model.target.spec.max_context
        longest, kinds = 0, dict[ControlSpec, Controls]()
        for record in records:
            if isinstance(record, BadRecord):
                continue
            try:
                job = self.job(record)
                need = self.need(job) if self._settings.capacity is None else 0
            except ValueError:
                continue
            if need <= context:
                longest = max(longest, need)
                kinds.setdefault(job.controls.spec, job.controls)
        return Needs(
            capacity=self._settings.capacity or fit_capacity(longest, context),
            controls=union_spec(list(kinds.values())),
            token_masks=self.constraints.masks,
        )

    def result(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Returns the output record of a record's jobs, as JSON values.

        Args:
          jobs: one a sample, finished.
        """
        record = jobs[0].record
        result: dict[str, Any] = {"id": record.id, "line": record.line}
        done = [completion for job in jobs for completion in job.completions]
        if done:
            if self._settings.n_samples == 1:
                result["turns"] = self._turns(jobs[0])
            else:
                result["samples"] = [
                    {"seed": job.seed, "turns": self._turns(job)} for job in jobs
                ]
            result["stats"] = Stats.total([c.stats for c in done]).as_dict()
            if record.settings:
                result["settings"] = dict(record.settings)
        failed = [job for job in jobs if job.error is not None]
        if failed:
            which = "" if len(jobs) == 1 else f"sample {failed[0].sample}: "
            result["error"] = f"{which}{failed[0].error}"
        return result

    def _turns(self, job: Job) -> list[dict[str, Any]]:
        return [self._turn(completion) for completion in job.completions]

    def _turn(self, completion: Completion) -> dict[str, Any]:
        turn: dict[str, Any] = {
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "n_prompt_tokens": len(completion.prompt_ids),
            "n_tokens": len(completion.ids),
        }
        if self._settings.ids:
            turn["ids"] = list(completion.ids)
        if self._settings.logprobs:
            turn["logprobs"] = [_finite(x) for x in completion.logprobs]
        if self._settings.top_logprobs:
            turn["top_logprobs"] = [
                [[ident, _finite(x)] for ident, x in best]
                for best in completion.top_logprobs
            ]
        return turn

    def _encode(self, record: Record, answers: list[str]) -> tuple[int, ...]:
        """Encodes the chat up to the turn that follows some answers."""
        if len(record.turns) == 1:
            return encode_prompt(self._model, record.turns[0], chat=self._settings.chat)
        messages = []
        for i, turn in enumerate(record.turns[: len(answers) + 1]):
            messages.append({"role": "user", "content": turn})
            if i < len(answers):
                messages.append({"role": "assistant", "content": answers[i]})
        return encode_prompt(self._model, messages)


def _finite(x: float) -> float | None:
    """Returns a number as JSON has it, which knows no infinities."""
    return x if math.isfinite(x) else None


def error_record(record: Record | BadRecord, error: str) -> dict[str, Any]:
    """Returns the output record of a record that cannot be served."""
    return {"id": record.id, "line": record.line, "error": error}
