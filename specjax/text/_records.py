"""Prompts from a JSONL file, each line judged on its own."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.text._settings import SETTINGS, check_settings

_BOM = b"\xef\xbb\xbf"


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of a prompt file.

    Attributes:
      line: number of the line, from 1.
      id: the record's name, unique in the file.
      turns: the user's turns, at least one, none of them blank.
      settings: checked generation settings that this record asks for.
      extra: the line's other keys, as they were.
    """

    line: int
    id: str
    turns: tuple[str, ...]
    settings: Mapping[str, Any]
    extra: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class BadRecord:
    """A line of a prompt file that cannot be used.

    Attributes:
      line: number of the line, from 1.
      id: the record's name where it could be read, else ``line-<number>``.
      error: what is wrong with it.
    """

    line: int
    id: str
    error: str


def read_records(path: str | os.PathLike[str]) -> Iterator[Record | BadRecord]:
    r"""Reads a JSONL file of prompts, one line at a time.

    A line is ``{"id": ..., "turns": [...]}`` or ``{"id": ..., "prompt": ...}``,
    with any of the settings of `check_settings` next to it. Without an id it is
    called ``line-<number>``. Blank lines are passed over. A line that cannot be
    used never stops the reading and is given out as a `BadRecord`.

    Args:
      path: the file, UTF-8 with or without a byte order mark, lines ended by
        ``\n`` or ``\r\n``.

    Returns:
      An iterator over the lines, in order.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the path is not a file.
    """
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"no prompt file at {file}")
    if file.is_dir():
        raise ValueError(f"{file} is a directory: give a JSONL file")
    return _iterate(file)


def _iterate(file: Path) -> Iterator[Record | BadRecord]:
    first_line: dict[str, int] = {}
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if number == 1:
                raw = raw.removeprefix(_BOM)
            if not raw.strip():
                continue
            record = _read_line(raw, number)
            # A bad line claims its id too: results are told apart by id alone.
            earlier = first_line.setdefault(record.id, number)
            if earlier != number:
                error = f"id {record.id!r} was already used in line {earlier}"
                if isinstance(record, BadRecord):
                    error = f"{record.error}; {error}"
                record = BadRecord(number, record.id, error)
            yield record


def _read_line(raw: bytes, number: int) -> Record | BadRecord:
    ident = f"line-{number}"
    try:
        content = _parse(raw)
        if "id" in content:
            ident = _check_id(content.pop("id"))
        turns = _take_turns(content)
        given = {name: content.pop(name) for name in SETTINGS if name in content}
        settings = check_settings(given, "settings")
    except ValueError as error:
        return BadRecord(number, ident, str(error))
    return Record(number, ident, turns, settings, content)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start}"
        ) from error
    try:
        content = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON: {error.msg} at character {error.pos + 1}"
        ) from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"must be a JSON object, got {_json_type(content)}: write "
            '{"id": ..., "prompt": ...}'
        )
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} is there twice")
        content[key] = value
    return content


def _check_id(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"id must be a string, got {_json_type(value)} {value!r:.60}")
    if not value.strip():
        raise ValueError("id is blank: leave it out or give a name")
    _check_surrogates(value, "id")
    return value


def _take_turns(content: dict[str, Any]) -> tuple[str, ...]:
    if "turns" in content and "prompt" in content:
        raise ValueError("has both 'turns' and 'prompt': keep one of them")
    if "prompt" in content:
        return (_check_turn(content.pop("prompt"), "prompt"),)
    if "turns" not in content:
        raise ValueError(
            f"has no 'prompt' and no 'turns'; its keys are {sorted(content)}"
        )
    turns = content.pop("turns")
    if not isinstance(turns, list):
        raise ValueError(f"turns must be a list of strings, got {_json_type(turns)}")
    if not turns:
        raise ValueError("turns is empty: give at least one turn")
    return tuple(_check_turn(turn, f"turns[{i}]") for i, turn in enumerate(turns))


def _check_turn(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {_json_type(value)}")
    if not value.strip():
        raise ValueError(f"{name} is blank: give a text")
    _check_surrogates(value, name)
    return value


def _check_surrogates(text: str, name: str) -> None:
    # JSON can spell half a character (\ud800), which no tokenizer can read.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} holds the lone surrogate U+{ord(text[error.start]):04X} at "
            f"character {error.start}: write the whole character"
        ) from error


def _json_type(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
