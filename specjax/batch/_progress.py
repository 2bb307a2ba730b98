"""Progress on stderr: a bar in a terminal, now and then a line elsewhere."""

import contextlib
import math
import sys
import time
from types import TracebackType
from typing import Self, TextIO

from specjax.decode import Stats

# Between two lines in a log.
_LINE_SECONDS = 10.0


def stats_text(stats: Stats, n_tokens: int, seconds: float) -> str:
    """Returns tokens, speed and what speculation did, on one line.

    Args:
      stats: of finished sequences.
      n_tokens: tokens of their texts.
      seconds: wall time of prefill, decoding and compilation.
    """
    rate = n_tokens / seconds if seconds > 0 else 0.0
    parts = [f"{n_tokens} tokens in {seconds:.2f} s ({rate:.1f} tokens/s)"]
    if not math.isnan(stats.tokens_per_pass):
        parts.append(f"{stats.tokens_per_pass:.2f} tokens/pass")
    if stats.verified:
        parts.append(
            f"{stats.accepted} of {stats.verified} drafts accepted "
            f"({100 * stats.accepted_fraction:.0f}%)"
        )
    return " | ".join(parts)


class Progress:
    """Counts what a run does and shows it.

    Attributes:
      stats: summed over the turns finished in this run.
      n_tokens: tokens of their texts.
      n_done: records that the output holds.
      n_errors: error records among them.
    """

    def __init__(
        self, total: int, n_done: int, n_errors: int, stream: TextIO | None = None
    ) -> None:
        """Begins at what an earlier run has done.

        Args:
          total: records of the prompt file.
          n_done: records that the output holds.
          n_errors: error records among them.
          stream: where to show; None is stderr.
        """
        self.stats = Stats.total([])
        self.n_tokens = 0
        self.n_done = n_done
        self.n_errors = n_errors
        self._total = total
        self._n_committed = 0
        self._stream = sys.stderr if stream is None else stream
        self._began: float | None = None
        self._ended: float | None = None
        self._shown = 0.0
        self._stack = contextlib.ExitStack()
        self._bar = self._task = None

    def __enter__(self) -> Self:
        self._began = self._shown = time.monotonic()
        if self._stream.isatty():
            from rich import progress
            from rich.console import Console

            # stdout belongs to the caller.
            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.TextColumn("{task.description}"),
                progress.TimeElapsedColumn(),
                console=Console(file=self._stream),
                redirect_stdout=False,
            )
            self._stack.enter_context(self._bar)
            self._task = self._bar.add_task(
                self.text(), total=self._total, completed=self.n_done
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended = time.monotonic()
        self._stack.close()

    @property
    def seconds(self) -> float:
        """Wall time between entering and leaving, so far."""
        if self._began is None:
            return 0.0
        return (self._ended or time.monotonic()) - self._began

    def committed(self, n: int) -> None:
        """Counts tokens of running sequences and shows the state of things."""
        self._n_committed += n
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.n_done, description=self.text())
        elif time.monotonic() - self._shown >= _LINE_SECONDS:
            self._shown = time.monotonic()
            print(self.text(), file=self._stream, flush=True)

    def turn(self, stats: Stats, n_tokens: int) -> None:
        """Counts a finished turn."""
        self.stats = Stats.total([self.stats, stats])
        self.n_tokens += n_tokens

    def record(self, *, failed: bool) -> None:
        """Counts a written record."""
        self.n_done += 1
        self.n_errors += failed

    def text(self) -> str:
        """Returns one line on the state of things."""
        seconds = self.seconds
        rate = self._n_committed / seconds if seconds > 0 else 0.0
        parts = [f"{self.n_done}/{self._total} done", f"{rate:.1f} tokens/s"]
        if self.stats.passes:
            parts.append(f"{self.stats.tokens_per_pass:.2f} tokens/pass")
        if self.stats.verified:
            parts.append(f"{100 * self.stats.accepted_fraction:.0f}% accepted")
        parts.append(f"{self.n_errors} errors")
        return " | ".join(parts)
