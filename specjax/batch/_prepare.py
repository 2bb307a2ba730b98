"""From a record of the prompt file to requests, turn by turn, and back."""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from specjax.batch._settings import BatchSettings, check_sampling_settings
from specjax.decode import Completion, Request, Stats, encode_prompt, fit_capacity
from specjax.text import BadRecord, Record

if TYPE_CHECKING:
    from specjax.weights import Model

# Stands for an answer that is not there yet when a conversation's length is bounded.
# Not empty, since templates may treat an empty message differently.
_STAND_IN = "ok"


@dataclasses.dataclass
class Job:
    """A record being worked on.

    Attributes:
      record: the record.
      sampling: the run's sampling settings, with the record's own over them.
      completions: its finished turns.
    """

    record: Record
    sampling: dict[str, Any]
    completions: list[Completion] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every turn has been answered."""
        return len(self.completions) == len(self.record.turns)


class Preparer:
    """Makes jobs and requests for a model under some settings."""

    def __init__(self, model: "Model", settings: BatchSettings, width: int) -> None:
        """Takes what the requests depend on.

        Args:
          model: tokenizer and chat template.
          settings: the run's.
          width: rows of the widest pass, which a slot needs beyond its tokens.
        """
        self._model = model
        self._settings = settings
        self._width = width

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
        return Job(record, {**self._settings.sampling, **own})

    def request(self, job: Job) -> Request:
        """Makes the request of a job's next turn.

        Raises:
          ValueError: the prompt or a setting is refused.
        """
        answers = [completion.text for completion in job.completions]
        return Request(
            prompt_ids=self._encode(job.record, answers),
            id=job.record.line,
            ignore_eos=self._settings.ignore_eos,
            **job.sampling,
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

    def fit(self, records: Iterable[Record | BadRecord]) -> int:
        """Returns a capacity for the longest record that the model's context holds."""
        context = self._model.target.spec.max_context
        longest = 0
        for record in records:
            if isinstance(record, BadRecord):
                continue
            try:
                need = self.need(self.job(record))
            except ValueError:
                continue  # It gets its error record when its turn comes.
            if need <= context:
                longest = max(longest, need)
        return fit_capacity(longest, context)

    def result(self, job: Job) -> dict[str, Any]:
        """Returns a job's output record, as JSON values."""
        turns = [self._turn(completion) for completion in job.completions]
        result: dict[str, Any] = {
            "id": job.record.id,
            "line": job.record.line,
            "turns": turns,
            "stats": Stats.total([c.stats for c in job.completions]).as_dict(),
        }
        if job.record.settings:
            result["settings"] = dict(job.record.settings)
        return result

    def failure(self, job: Job, error: str) -> dict[str, Any]:
        """Returns the error record of a job, with the turns that were answered."""
        if not job.completions:
            return error_record(job.record, error)
        return {**self.result(job), "error": error}

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
            # JSON has no infinities.
            turn["logprobs"] = [
                x if math.isfinite(x) else None for x in completion.logprobs
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


def error_record(record: Record | BadRecord, error: str) -> dict[str, Any]:
    """Returns the output record of a record that cannot be served."""
    return {"id": record.id, "line": record.line, "error": error}
