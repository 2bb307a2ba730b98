"""What decoding gives back."""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal

from specjax.decode._state import RowStats

FinishReason = Literal["stop", "length", "error"]


@dataclasses.dataclass(frozen=True)
class Stats:
    """What speculation did, for one sequence or summed over several.

    Attributes:
      passes: target passes the sequence took part in. For a sum over a batch this
        counts each row's share: a pass over 8 rows counts 8.
      wide_passes: those of them wider than one row a sequence.
      verified: draft tokens the target scored.
      accepted: draft tokens the rule kept, also those then cut off by a stop id or
        the length limit.
      committed: tokens appended, the rule's own ones included; a stop string found
        afterwards on the host trims the text, not this number.
      verified_at: drafts scored at each draft position 1..gamma.
      reached_at: those of them whose predecessors were all kept.
      accepted_at: drafts kept at each draft position 1..gamma.
    """

    passes: int
    wide_passes: int
    verified: int
    accepted: int
    committed: int
    verified_at: tuple[int, ...]
    reached_at: tuple[int, ...]
    accepted_at: tuple[int, ...]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens committed a target pass, in [1, gamma + 1]; nan without passes."""
        return self.committed / self.passes if self.passes else float("nan")

    @property
    def accepted_fraction(self) -> float:
        """Accepted over verified drafts; nan where nothing was drafted.

        This is not the acceptance rate alpha = 1 - TV(p, q): a draft after a
        rejected one counts as verified here.
        """
        return self.accepted / self.verified if self.verified else float("nan")

    @property
    def acceptance_at(self) -> tuple[float, ...]:
        """Conditional acceptance of each draft position.

        Of the drafts at position j whose predecessors were all accepted, the
        fraction that was accepted too; nan where there were none.
        """
        pairs = zip(self.accepted_at, self.reached_at, strict=True)
        return tuple(a / r if r else float("nan") for a, r in pairs)

    @classmethod
    def total(cls, parts: Sequence["Stats"]) -> "Stats":
        """Sums statistics of several sequences."""
        width = max((len(p.verified_at) for p in parts), default=0)
        at = lambda values: tuple(
            sum(v[j] if j < len(v) else 0 for v in values) for j in range(width)
        )
        return cls(
            passes=sum(p.passes for p in parts),
            wide_passes=sum(p.wide_passes for p in parts),
            verified=sum(p.verified for p in parts),
            accepted=sum(p.accepted for p in parts),
            committed=sum(p.committed for p in parts),
            verified_at=at([p.verified_at for p in parts]),
            reached_at=at([p.reached_at for p in parts]),
            accepted_at=at([p.accepted_at for p in parts]),
        )

    @classmethod
    def of_row(cls, stats: RowStats, row: int) -> "Stats":
        """Reads one slot's counters, arrays on the host."""
        return cls(
            *(int(x[row]) for x in stats[:5]),
            verified_at=tuple(int(x) for x in stats.verified_at[row]),
            reached_at=tuple(int(x) for x in stats.reached_at[row]),
            accepted_at=tuple(int(x) for x in stats.accepted_at[row]),
        )

    def as_dict(self) -> dict[str, object]:
        """Returns the counters and tokens_per_pass as plain JSON values."""
        record = dataclasses.asdict(self)
        record["tokens_per_pass"] = round(self.tokens_per_pass, 4) if self.passes else 0
        return record


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished sequence.

    Attributes:
      id: as in the request.
      prompt_ids: the prompt.
      ids: generated ids, trimmed like the text; a stop id that ended it is last.
      text: generated text, without special tokens and without the stop string.
      logprobs: natural-log probability of each id under the target's own law
        (temperature 1, no filters), as long as ``ids``.
      origins: where each id came from (``Origin``), as long as ``ids``.
      top_logprobs: for each id, the most probable ids of its position and their
        natural-log probabilities under the target's own law, most probable first;
        empty where none were asked for.
      finish_reason: ``stop`` (a stop id or stop string), ``length`` or ``error``.
      error: for ``error``, what went wrong and where; otherwise None.
      stats: what speculation did.
    """

    id: Hashable
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    origins: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    stats: Stats
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Generation(Sequence[Completion]):
    """Completions in the order of their prompts, and how long they took.

    Shown in a notebook or terminal, it marks accepted, corrected and bonus tokens.

    Attributes:
      completions: one a prompt.
      pieces: the text of each id of each completion, for display.
      seconds: wall time of prefill, decoding and compilation.
      stats: summed over the completions.
    """

    completions: tuple[Completion, ...]
    pieces: tuple[tuple[str, ...], ...]
    seconds: float

    @property
    def stats(self) -> Stats:
        """Statistics summed over the completions."""
        return Stats.total([c.stats for c in self.completions])

    @property
    def texts(self) -> list[str]:
        """The generated texts."""
        return [c.text for c in self.completions]

    def __len__(self) -> int:
        return len(self.completions)

    def __getitem__(self, index):  # type: ignore[override]
        """Returns one completion, or a tuple of them for a slice."""
        return self.completions[index]

    def __iter__(self) -> Iterator[Completion]:
        return iter(self.completions)

    def _repr_html_(self) -> str:
        from specjax.viz import generation_html

        return generation_html(self)

    def __rich__(self):
        from specjax.viz import generation_rich

        return generation_rich(self)

    def __repr__(self) -> str:
        from specjax.viz import summary_line

        return "\n\n".join([*(c.text for c in self.completions), summary_line(self)])
