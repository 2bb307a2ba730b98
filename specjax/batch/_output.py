"""The output file of a run: locked, resumed, and appended to a line at a time.

Next to ``out.jsonl`` lies ``out.jsonl.meta.json`` with the settings and the hash of
the prompts that it was begun with. A record is one line, appended by one write, so
that a kill leaves at most one half-written line, the last, which the next run cuts
off. The lock is on the output file itself and goes with the process, however it ends.
"""

import dataclasses
import datetime
import fcntl
import hashlib
import json
import os
import platform
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specjax.batch._errors import RunError, UsageError
from specjax.drafters import PassCosts

_FORMAT = 1

# A kill of the process loses nothing that was written; this bounds what a power cut
# loses, without waiting for the disk at every record.
_SYNC_SECONDS = 5.0

# Legal inside a JSON string, but line ends to some readers of "lines".
_LINE_ENDS = {"\u2028": "\\u2028", "\u2029": "\\u2029", "\x85": "\\u0085"}


@dataclasses.dataclass(frozen=True)
class Done:
    """A record that the output already holds.

    Attributes:
      id: the record's name.
      failed: whether it is an error record.
    """

    id: str
    failed: bool


class OutputFile:
    """Results so far, and where the next ones go.

    Attributes:
      path: the output.
      done: records that it holds, by line of the prompt file.
      cut_bytes: bytes of a half-written record that were cut off its end.
      sha256: of the prompt file.
    """

    def __init__(
        self, path: str | os.PathLike[str], fingerprint: Mapping[str, Any], sha256: str
    ) -> None:
        """Opens, locks and repairs the output, creating it where there is none.

        Args:
          path: the output.
          fingerprint: settings that must be those it was begun with.
          sha256: of the prompt file, likewise.

        Raises:
          UsageError: it cannot be written, another run writes it, it is no output of
            this script, or it was begun with other settings or prompts.
        """
        self.path = Path(path)
        self.done: dict[int, Done] = {}
        self.cut_bytes = 0
        self._meta_path = Path(f"{path}.meta.json")
        self._fingerprint = dict(fingerprint)
        self.sha256 = sha256
        self._synced = time.monotonic()
        self._created = not self.path.exists()
        self._fd = _open(self.path)
        try:
            _lock(self._fd, self.path)
            self._runs = self._resume()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def n_failed(self) -> int:
        """Error records among those done."""
        return sum(done.failed for done in self.done.values())

    def begin(
        self,
        batch_size: int,
        costs: PassCosts | None = None,
        *,
        same_costs: bool = False,
    ) -> None:
        """Writes the meta file; to be called before the first ``append``.

        Args:
          batch_size: of this run; it is noted, not compared.
          costs: that this run's drafts go by, likewise.
          same_costs: whether they must be those of the runs before, as the ids depend
            on them.

        Raises:
          UsageError: it cannot be written, or the costs are others.
        """
        noted = None
        if costs is not None:
            noted = {"draft": costs.draft, "verify": list(costs.verify)}
        if same_costs and self._runs and self._runs[-1].get("costs") != noted:
            raise UsageError(
                f"{self.path} was begun with other costs of passes, which its rule's "
                "ids depend on. Give the --costs and --batch_size that it was begun "
                f"with ({self._meta_path.name} has them), or another --output."
            )
        meta = {
            "format": _FORMAT,
            "settings": self._fingerprint,
            "prompts_sha256": self.sha256,
            "runs": [
                *self._runs,
                {**_provenance(), "batch_size": batch_size, "costs": noted},
            ],
        }
        try:
            _write_atomically(self._meta_path, json.dumps(meta, indent=2) + "\n")
        except OSError as error:
            raise UsageError(
                f"{self._meta_path} cannot be written: {error.strerror}."
            ) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Appends a record as one line.

        Args:
          record: JSON values, with ``id`` and ``line``.

        Raises:
          RunError: the line could not be written.
        """
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
        for char, escape in _LINE_ENDS.items():
            text = text.replace(char, escape)
        # A lone surrogate, which only a message could quote, becomes its JSON escape.
        left = memoryview((text + "\n").encode("utf-8", "backslashreplace"))
        try:
            while left:
                left = left[os.write(self._fd, left) :]
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                os.fsync(self._fd)
                self._synced = time.monotonic()
        except OSError as error:
            raise RunError(
                f"{self.path} could not be written on: {error.strerror}. The "
                f"{len(self.done)} records before are kept; run the same command again "
                "to go on from there."
            ) from error
        self.done[record["line"]] = Done(record["id"], "error" in record)

    def close(self) -> None:
        """Syncs and unlocks; removes a file that this run made and left empty."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if self._created and os.fstat(fd).st_size == 0:
                self.path.unlink(missing_ok=True)
                self._meta_path.unlink(missing_ok=True)
            else:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _resume(self) -> list[dict[str, Any]]:
        """Takes over what is there; returns the earlier runs' notes."""
        size = os.fstat(self._fd).st_size
        if size == 0:
            # Killed before its first record, or a meta file without an output:
            # there is nothing to be lost or mixed up.
            return []
        if not self._meta_path.exists():
            raise UsageError(
                f"{self.path} exists without {self._meta_path.name}, so it is not "
                "known what it was made with. Give another --output, or move the "
                "file away."
            )
        meta = _read_meta(self._meta_path)
        # Before any change to the file.
        self._compare(meta)
        good = self._read_done()
        if good < size:
            os.ftruncate(self._fd, good)
            self.cut_bytes = size - good
        return list(meta["runs"])

    def _compare(self, meta: Mapping[str, Any]) -> None:
        before, now = meta["settings"], self._fingerprint
        names = [n for n in {**now, **before} if before.get(n) != now.get(n)]
        if names:
            differ = "; ".join(
                f"{n} was {json.dumps(before.get(n))} and is {json.dumps(now.get(n))}"
                for n in names
            )
            raise UsageError(
                f"{self.path} was begun with other settings: {differ}. Give those "
                "again, or another --output."
            )
        if meta["prompts_sha256"] != self.sha256:
            raise UsageError(
                f"The prompt file is not the one that {self.path} was begun with (its "
                "SHA-256 differs). Give that one, or another --output."
            )

    def _read_done(self) -> int:
        """Reads the records there are; returns the bytes that hold them."""
        good = 0
        with self.path.open("rb") as lines:
            bad = None
            for number, raw in enumerate(lines, start=1):
                if bad is not None:
                    raise UsageError(
                        f"{self.path}: line {bad} is not JSON and more follows, which "
                        "no interrupted run leaves behind. Remove the line, or give "
                        "another --output."
                    )
                try:
                    record = json.loads(raw) if raw.endswith(b"\n") else None
                except (ValueError, RecursionError):
                    record = None
                if record is None:
                    bad = number
                    continue
                self._take(record, number)
                good += len(raw)
        return good

    def _take(self, record: Any, number: int) -> None:
        ours = (
            isinstance(record, dict)
            and isinstance(record.get("id"), str)
            and type(record.get("line")) is int
        )
        if not ours or record["line"] in self.done:
            what = (
                "repeats an earlier record" if ours else "is no record of this script"
            )
            raise UsageError(
                f"{self.path}: line {number} {what}. Remove the line, or give another "
                "--output."
            )
        self.done[record["line"]] = Done(record["id"], "error" in record)


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> int:
    if path.is_dir():
        raise UsageError(f"--output={path} is a directory: name a file in it.")
    if not path.parent.is_dir():
        raise UsageError(
            f"--output={path}: there is no directory {path.parent}; make it first."
        )
    if path.exists() and not path.is_file():
        raise UsageError(
            f"--output={path} is no regular file, which going on after a kill needs."
        )
    try:
        # O_RDWR, not O_WRONLY: some network file systems lock readable files only.
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UsageError(
            f"--output={path} cannot be written: {error.strerror}."
        ) from error
    assert stat.S_ISREG(os.fstat(fd).st_mode)
    return fd


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"Another run is writing {path}. Wait for it, end it, or give another "
            "--output."
        ) from error
    except OSError as error:
        raise UsageError(
            f"{path} cannot be locked ({error.strerror}), so two runs could mix their "
            "records. Put the output on another file system."
        ) from error


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text("utf-8"))
        ours = (
            isinstance(meta, dict)
            and meta.get("format") == _FORMAT
            and isinstance(meta["settings"], dict)
            and isinstance(meta["prompts_sha256"], str)
            and isinstance(meta["runs"], list)
        )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} cannot be read ({error}); give another --output."
        ) from error
    if not ours:
        raise UsageError(
            f"{path} is of no form that this version knows; give another --output."
        )
    return meta


def _write_atomically(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _provenance() -> dict[str, Any]:
    """What a run's text may depend on besides its settings."""
    import jax

    import specjax

    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "specjax": specjax.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "n_devices": len(devices),
        "host": platform.machine(),
    }
