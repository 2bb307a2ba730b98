"""From settings to an exit status."""

import dataclasses
import os
import signal
import sys

from specjax.batch._errors import Interrupted, RunError, Signals, UsageError
from specjax.batch._run import run_file
from specjax.batch._settings import BatchSettings
from specjax.batch._single import run_prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """What to generate for: one prompt, or a file of them and where to write.

    Attributes:
      prompt: one prompt's text, or None.
      prompts: a JSONL file of prompts, or None.
      output: the JSONL file for their results, or None.

    Raises:
      UsageError: not exactly one of prompt and prompts, or output does not fit.
    """

    prompt: str | None = None
    prompts: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        """Checks that the three go together."""
        for name, value in dataclasses.asdict(self).items():
            if value is not None and not isinstance(value, str):
                raise UsageError(f"--{name} must be a string, got {value!r}.")
        if (self.prompt is None) == (self.prompts is None):
            which = "both" if self.prompt is not None else "neither"
            raise UsageError(
                "Give exactly one of --prompt=TEXT and --prompts=FILE.jsonl; got "
                f"{which}."
            )
        if self.prompts is not None and not self.output:
            raise UsageError("--prompts needs --output=FILE.jsonl for the results.")
        if self.prompt is not None and self.output is not None:
            raise UsageError(
                "--output goes with --prompts; the text of --prompt goes to stdout."
            )
        if self.prompt is not None and not self.prompt.strip():
            raise UsageError("--prompt is blank: give a text.")


def main(settings: BatchSettings, files: Files) -> int:
    """Generates, with messages on stderr.

    Args:
      settings: the settings.
      files: what to generate for.

    Returns:
      The exit status: 0; 1 when a record has an error or the run broke off; 2 when
      it was refused before any work; 128 + the signal when interrupted.
    """
    try:
        with Signals() as signals:
            if files.prompt is not None:
                return int(not run_prompt(settings, files.prompt))
            assert files.prompts is not None and files.output is not None
            summary = run_file(settings, files.prompts, files.output, signals=signals)
            return int(summary.n_errors > 0)
    except UsageError as error:
        _say(f"error: {error}")
        return 2
    except RunError as error:
        _say(f"error: {error}")
        return 1
    except BrokenPipeError:
        # Whoever read stdout has left; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Interrupted as interrupted:
        hint = ""
        if files.output is not None:
            hint = (
                f" {files.output} is whole; run the same command again to go on "
                "from there."
            )
        _say(f"\nstopped by {interrupted}.{hint}")
        return 128 + interrupted.signum


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
