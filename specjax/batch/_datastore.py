"""Datastores out of text and JSONL files: what ``scripts/build_datastore.py`` runs."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax.batch._errors import UsageError
from specjax.drafters import (
    build_datastore,
    documents_of,
    extend_datastore,
    load_datastore,
    save_datastore,
)
from specjax.text import Tokenizer
from specjax.weights import load

# Enough of a text to tell tokenizers apart, and few enough characters that a stop
# string or half a character at its end plays no part.
_N_COMPARED = 16


def write_datastore(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    model: str,
    append: str | os.PathLike[str] | None = None,
    size: int | None = None,
) -> str:
    """Builds a datastore file from text and JSONL files, or adds them to one.

    Args:
      inputs: files for ``read_documents``, in the order of their recency.
      output: the ``.npz`` file to write. One that exists is only written over where
        it is ``append`` itself.
      model: whose tokenizer makes the ids: anything for ``specjax.load``.
      append: a datastore file to which the documents are added.
      size: tokens to make room for; None is the next power of two, or the size of
        ``append`` as long as that is enough.

    Returns:
      What was done, in a line.

    Raises:
      UsageError: something was refused; nothing was written.
    """
    target = Path(output)
    _check_paths(inputs, target, append)
    tokenizer = load_tokenizer(model)
    meaning = tokenizer.fingerprint()
    try:
        store = None if append is None else load_datastore(append, fingerprint=meaning)
        new = [d for path in inputs for d in read_documents(path, tokenizer)]
        if store is None:
            store = build_datastore(new, size=size)
        elif size is None:
            store = extend_datastore(store, new)
        else:
            store = build_datastore([*documents_of(store), *new], size=size)
        save_datastore(target, store, fingerprint=meaning)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    lengths = [len(document) for document in documents_of(store)]
    return (
        f"{target}: {len(lengths)} documents of {sum(lengths)} tokens, {len(new)} of "
        f"them new; size {store.size}, {8 * store.size / 1e6:.3g} MB on the device"
    )


def load_tokenizer(model: str) -> Tokenizer:
    """Loads a model's tokenizer, without its weights where that is easy.

    Args:
      model: anything for ``specjax.load``.

    Returns:
      The tokenizer.

    Raises:
      UsageError: there is no such model, or it has none.
    """
    path = Path(model).expanduser()
    try:
        for folder in (path, path / "tokenizer"):
            if (folder / "tokenizer.json").is_file():
                return Tokenizer.from_directory(folder)
        # bfloat16: the weights are dropped again.
        tokenizer = load(model, dtype="bfloat16").tokenizer
    except (OSError, ValueError) as error:
        raise UsageError(f"--model={model}: {error}") from error
    if tokenizer is None:
        raise UsageError(f"--model={model} has no tokenizer, which text needs.")
    return tokenizer


def read_documents(
    path: str | os.PathLike[str], tokenizer: Tokenizer
) -> Iterator[list[int]]:
    """Reads the documents of a file.

    A file that does not end in ``.jsonl`` is one document of UTF-8 text. A line of a
    JSONL file is a record of which these are documents: "text"; "prompt"; each of
    "turns", which is a text, or an answer in a batch run's output, of which the "ids"
    are taken where they are written and the "text" otherwise; and the turns of each of
    "samples". Error records without an answer are passed over.

    Args:
      path: the file.
      tokenizer: makes the ids. It adds no special tokens.

    Yields:
      Ids of a document.

    Raises:
      UsageError: the file cannot be read, or a line of it is no such record, or holds
        ids of another tokenizer; the message names file and line.
    """
    path = Path(path)
    try:
        if path.suffix != ".jsonl":
            text = path.read_text("utf-8-sig")
            yield tokenizer.encode(text, add_special_tokens=False)
            return
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if raw.strip():
                    yield from _of_line(raw, f"{path}, line {number}", tokenizer)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (byte {error.start}); convert it."
        ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _of_line(raw: bytes, where: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where} is not JSON ({error}). Where a run that was killed left half a "
            "line, start it again first."
        ) from error
    try:
        for turn in _turns_of(record):
            yield _ids_of(turn, tokenizer)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from error


def _turns_of(record: Any) -> Iterator[Any]:
    """Gives the texts and answers of a record."""
    if not isinstance(record, dict):
        raise ValueError("a record is a JSON object.")
    known = [key for key in ("text", "prompt", "turns", "samples") if key in record]
    if not known and "error" not in record:
        raise ValueError(
            'it has none of the keys "text", "prompt", "turns" and "samples"; its keys '
            f"are {sorted(record)}."
        )
    for key in known:
        value = record[key]
        if key in ("text", "prompt"):
            yield value
            continue
        if not isinstance(value, list):
            raise ValueError(f'"{key}" must be a list.')
        if key == "turns":
            yield from value
            continue
        for sample in value:
            yield from _turns_of(sample)


def _ids_of(turn: Any, tokenizer: Tokenizer) -> list[int]:
    text = turn.get("text") if isinstance(turn, dict) else turn
    if not isinstance(text, str):
        raise ValueError(f"a turn must be a text, or an answer with one; got {turn!r}.")
    if isinstance(turn, dict) and "ids" in turn:
        if not isinstance(turn["ids"], list):
            raise ValueError('"ids" must be a list.')
        ids = tokenizer.check_ids(turn["ids"])
        said = tokenizer.decode(ids, skip_special_tokens=True).strip()
        begins = text.strip()[:_N_COMPARED].rstrip("\ufffd")
        if not said.startswith(begins):
            raise ValueError(
                f"its ids say {said[:_N_COMPARED]!r} in this tokenizer, its text "
                f"{begins!r}. Give the --model of that run."
            )
        return ids
    return tokenizer.encode(text, add_special_tokens=False)


def _check_paths(
    inputs: Sequence[str | os.PathLike[str]],
    output: Path,
    append: str | os.PathLike[str] | None,
) -> None:
    """Refuses what would fail only after the work."""
    for path in map(Path, inputs):
        if not path.is_file():
            raise UsageError(f"{path} is no file: give text or JSONL files.")
    if not inputs and append is None:
        raise UsageError("Give text or JSONL files to build a datastore from.")
    if output.suffix != ".npz":
        raise UsageError(f"--output={output} must end in .npz.")
    if not output.parent.is_dir():
        raise UsageError(
            f"--output={output}: there is no directory {output.parent}; make it first."
        )
    if not os.access(output.parent, os.W_OK):
        raise UsageError(f"--output={output}: its directory cannot be written to.")
    itself = append is not None and output.exists() and output.samefile(append)
    if output.exists() and not itself:
        raise UsageError(
            f"--output={output} exists. Add to it with --append={output}, or give "
            "another name."
        )
