"""Stop strings: where a text ends, and what of it may be shown."""

from collections.abc import Iterable, Sequence

from specjax.text._detokenize import Starts, make_stream
from specjax.text._tokenizer import Tokenizer, check_text


class StopStringMatcher:
    """Looks for stop strings in text that arrives in pieces.

    Of several stop strings in the text the one that starts first wins, the
    longest of them where two start together. Text is held back as long as it
    could be the beginning of a stop string.
    """

    def __init__(self, stop: Sequence[str]):
        """Starts with an empty text.

        Args:
          stop: the stop strings; there may be none.

        Raises:
          TypeError: `stop` is one string, or holds something else than strings.
          ValueError: a stop string is empty or holds a lone surrogate.
        """
        if isinstance(stop, str):
            raise TypeError(f"stop must be a list of strings: use [{stop!r}]")
        for string in stop:
            check_text(string, "a stop string")
            if not string:
                raise ValueError(
                    "a stop string is empty and would end every text at once: remove it"
                )
        self._stops = sorted(set(stop), key=len, reverse=True)
        self._held = ""
        self._n_shown = 0
        self._match: str | None = None
        self._flushed = False

    @property
    def finished(self) -> bool:
        """Whether a stop string was found."""
        return self._match is not None

    @property
    def match(self) -> str | None:
        """The stop string that was found, or None."""
        return self._match

    @property
    def n_chars(self) -> int:
        """Number of characters returned so far, all of them before the stop."""
        return self._n_shown

    def push(self, text: str) -> str:
        """Takes the next piece of text.

        Args:
          text: any piece, also an empty one.

        Returns:
          The text that is now safe to show.

        Raises:
          ValueError: a stop string was found before, or the text was ended.
        """
        if self.finished or self._flushed:
            raise ValueError(
                "push after the text ended: check `finished`, and use a new matcher "
                "for another text"
            )
        self._held += text
        return self._advance(final=False)

    def skip(self, text: str) -> str:
        """Takes a piece of text in which no stop string counts.

        Args:
          text: any piece; allowed only before the first ``push``.

        Returns:
          The text itself.

        Raises:
          ValueError: text was pushed, or the text was ended.
        """
        if self.finished or self._flushed or self._held:
            raise ValueError("skip after push: only a text's beginning can be skipped")
        self._n_shown += len(text)
        return text

    def flush(self) -> str:
        """Ends the text.

        Returns:
          What was held back, up to a stop string if there is one.
        """
        if self.finished or self._flushed:
            return ""
        self._flushed = True
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        found = [(self._held.find(stop), stop) for stop in self._stops]
        # The longest come first, and min keeps the first of equals.
        start, stop = min(
            ((at, stop) for at, stop in found if at >= 0),
            key=lambda pair: pair[0],
            default=(len(self._held), None),
        )
        # A longer stop string that starts further left may still be completed.
        open_at = start if final else self._first_open(start)
        if open_at == start and stop is not None:
            self._match = stop
        shown = self._held[:open_at]
        self._held = "" if self.finished else self._held[open_at:]
        self._n_shown += len(shown)
        return shown

    def _first_open(self, end: int) -> int:
        """Where the first unfinished stop string before `end` starts, or `end`."""
        longest = len(self._stops[0]) if self._stops else 0
        for at in range(max(0, len(self._held) - longest + 1), end):
            tail = self._held[at:]
            if any(stop.startswith(tail) for stop in self._stops):
                return at
        return end


class TextStream:
    """The text of one generated sequence, ended by stop strings.

    Ids go in, text that is safe to show comes out: whole characters, and nothing
    that could be the beginning of a stop string. After a stop string `text`,
    `n_tokens` and whatever was computed for each id are trimmed alike. The
    result does not depend on how the ids are cut into pushes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ):
        """Starts with an empty text.

        Args:
          tokenizer: the tokenizer of the ids.
          stop: the stop strings; there may be none.
          min_tokens: stop strings count from the text of the id after this many on.
          skip_special_tokens: leave special tokens out of the text.

        Raises:
          TypeError: `stop` is one string, or holds something else than strings.
          ValueError: a stop string is empty or holds a lone surrogate, or the
            tokenizer's text cannot be given out piece by piece.
        """
        self._tokenizer = tokenizer
        self._matcher = StopStringMatcher(stop)
        self._min_tokens = min_tokens
        self._stream = make_stream(tokenizer)
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pieces: list[str] = []
        self._n_pushed = 0
        # For the ids that are not left out: their place among all ids, and where
        # the text that they carry starts.
        self._places: list[int] = []
        self._starts: Starts = []
        self._flushed = False

    @property
    def finished(self) -> bool:
        """Whether a stop string was found."""
        return self._matcher.finished

    @property
    def stop(self) -> str | None:
        """The stop string that was found, or None."""
        return self._matcher.match

    @property
    def text(self) -> str:
        """All text returned so far; it ends right before the stop string."""
        return "".join(self._pieces)

    @property
    def n_tokens(self) -> int:
        """How many of the pushed ids to keep.

        After a stop string these are the ids up to the last one that carries any
        of the kept text. Before, nothing is trimmed and it is all ids pushed.
        """
        if not self.finished:
            return self._n_pushed
        kept = [
            place
            for place, start in zip(self._places, self._starts, strict=False)
            if start is not None and start < self._matcher.n_chars
        ]
        n_kept = kept[-1] + 1 if kept else 0
        return max(n_kept, min(self._min_tokens, self._n_pushed))

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids.

        Ids of this push that come after a stop string are not part of the text.

        Args:
          ids: any number of token ids.

        Returns:
          The text that is now safe to show.

        Raises:
          TypeError: an id is not an integer.
          ValueError: an id has no token, a stop string was found before, or the
            text was ended by `flush`.
        """
        if self.finished or self._flushed:
            raise ValueError(
                "push after the text ended: check `finished`, and use a new stream "
                "for another text"
            )
        pieces = []
        for ident in self._tokenizer.check_ids(ids):
            self._n_pushed += 1
            if ident in self._skipped:
                continue
            self._places.append(self._n_pushed - 1)
            text, starts = self._stream.feed(ident)
            self._starts += starts
            # One token at a time, so that a match is found at the same id however
            # the ids are cut into pushes.
            early = self._n_pushed <= self._min_tokens
            take = self._matcher.skip if early else self._matcher.push
            pieces.append(take(text))
            if self.finished:
                break
        self._pieces += pieces
        return "".join(pieces)

    def flush(self) -> str:
        """Ends the text.

        Returns:
          What was held back, up to a stop string if there is one.
        """
        if self.finished or self._flushed:
            return ""
        self._flushed = True
        text, starts = self._stream.finish()
        self._starts += starts
        shown = self._matcher.push(text)
        shown += self._matcher.flush()
        self._pieces.append(shown)
        return shown
