"""Another engine, timed in the same run through a pipe."""

import json
import shlex
import subprocess
from collections.abc import Sequence

from specjax.bench._speed import Measurement


class Peer:
    """A program that generates on request and times itself.

    It reads one JSON object a line, {"ids": [...], "max_new_tokens": n, "lookup": k}
    (k draft tokens of prompt lookup, 0 for plain decoding), generates greedily without
    stopping at end ids, and answers with {"prefill_s": s, "decode_s": s, "ids": [...]}.
    So a peer needs none of specjax, and specjax none of the peer.
    """

    def __init__(self, name: str, command: str) -> None:
        """Starts the program.

        Args:
          name: how it appears in tables.
          command: its command line.

        Raises:
          ValueError: the program cannot be started.
        """
        self.name = name
        try:
            self._process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ValueError(
                f"peer {name!r}: cannot run {command!r}: {error}"
            ) from None

    def measure(
        self, ids: Sequence[int], max_new_tokens: int, *, lookup: int
    ) -> Measurement:
        """Times one request.

        Args:
          ids: the prompt.
          max_new_tokens: tokens to generate.
          lookup: draft tokens of prompt lookup; 0 is plain decoding.

        Returns:
          What the peer measured.

        Raises:
          RuntimeError: the peer ended or answered something else.
        """
        request = {"ids": list(ids), "max_new_tokens": max_new_tokens, "lookup": lookup}
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, json.JSONDecodeError) as error:
            raise RuntimeError(f"peer {self.name!r} gave no answer: {error}") from error
        return Measurement(
            prefill_s=answer["prefill_s"],
            decode_s=answer["decode_s"],
            n_tokens=len(answer["ids"]),
            passes=answer.get("passes", 0),
            ids=tuple(answer["ids"]),
        )

    def close(self) -> None:
        """Ends the program."""
        self._process.kill()
        self._process.communicate()  # also closes the pipes
