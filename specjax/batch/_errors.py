"""How a run ends before its end, and the signals that end it."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class UsageError(ValueError):
    """The run was refused before any work; the message has the remedy."""


class RunError(RuntimeError):
    """The run broke off; what its output holds is kept."""


class Interrupted(BaseException):
    """A signal asked the run to end.

    Not an ``Exception``: like KeyboardInterrupt it must pass through handlers of
    ordinary errors.

    Attributes:
      signum: the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Signals:
    """Turns SIGINT and SIGTERM into ``Interrupted`` while it is entered."""

    def __init__(self) -> None:
        self._caught: int | None = None
        self._held = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        # Python sets handlers from the main thread only; elsewhere, as in a notebook
        # server's worker, whoever owns that thread has the say.
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raises what a callback of foreign code may have swallowed.

        Raises:
          Interrupted: a signal came.
        """
        if self._caught is not None:
            raise Interrupted(self._caught)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Puts signals off until the block is done, so that a line is written whole.

        Raises:
          Interrupted: a signal came meanwhile.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._caught = signum
        if not self._held:
            raise Interrupted(signum)
