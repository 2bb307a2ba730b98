"""Text to draft from, sorted so that a device finds what it has seen before.

A datastore holds documents (earlier outputs, a corpus) as ids with a separator between
them, and the positions of all ids sorted by the text read backwards from each: the
suffix array of the reversed text. The positions whose last m tokens are those of a
query are neighbours in it, for every m, so that one search finds the longest match.

References: He et al., "REST", arXiv:2311.08252; Oliaro et al., "SuffixDecoding",
arXiv:2411.04975; prefix doubling: Larsson and Sadakane, "Faster suffix sorting", 2007.
"""

import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.typing import Array, Int

#: Between documents, at both ends, and in the room that is not used. No id is
#: negative, so that no match reads over it.
SEPARATOR = -1

_FORMAT = 1
_SMALLEST = 1024
# Twice a position must fit an int32 on the device.
_LARGEST = 2**30
_REMEDY = "Make it anew with scripts/build_datastore.py."


class Datastore(NamedTuple):
    """Documents to draft from: the parameters of the drafter ``suffix``.

    Made by ``build_datastore``, ``extend_datastore`` or ``load_datastore``.

    Attributes:
      tokens: ids of all documents in their order, -1 before, between and after them
        and in the room left at the end. [N] int32
      order: positions of ``tokens``, sorted by the text read backwards from each up to
        the separator before it; separators first, equal texts by position. [N] int32
    """

    tokens: Int[Array, " N"]
    order: Int[Array, " N"]

    @property
    def size(self) -> int:
        """Tokens there is room for, separators included: a program's static shape."""
        return self.tokens.shape[0]


def build_datastore(
    documents: Iterable[Sequence[int] | np.ndarray], *, size: int | None = None
) -> Datastore:
    """Sorts documents into a datastore, on the host.

    Takes O(N log N) time a doubling, of which there are as many as the longest text
    that occurs twice has bits: about a second for a million tokens.

    Args:
      documents: ids of each document; empty ones are passed over. Later documents
        count as more recent.
      size: tokens to make room for, with one separator a document and one more; None
        is the next power of two. Datastores of one size share compiled programs.

    Returns:
      The datastore, on the default device.

    Raises:
      ValueError: an id is no whole number in [0, 2**31), or the size is too small or
        above 2**30.
    """
    pieces = [np.array([SEPARATOR], np.int32)]
    for number, document in enumerate(documents):
        ids = _check_document(document, number)
        if len(ids):
            pieces += [ids, pieces[0]]
    need = sum(len(piece) for piece in pieces)
    if size is None:
        size = max(_SMALLEST, 1 << (need - 1).bit_length())
    if not need <= size <= _LARGEST:
        raise ValueError(
            f"size={size} must be in [{need}, 2**30]: the documents have {need} tokens "
            "with their separators."
        )
    tokens = np.full((size,), SEPARATOR, np.int32)
    tokens[:need] = np.concatenate(pieces)
    return Datastore(jnp.asarray(tokens), jnp.asarray(sort_backwards(tokens)))


def extend_datastore(
    store: Datastore, documents: Iterable[Sequence[int] | np.ndarray]
) -> Datastore:
    """Adds documents, on the host.

    Args:
      store: the datastore, which is left as it is.
      documents: ids of each new document.

    Returns:
      A datastore of all documents, of the same size as long as they fit, so that
      programs compiled for it are kept; else of the next power of two that holds them.

    Raises:
      ValueError: as in ``build_datastore``.
    """
    new = [_check_document(d, number) for number, d in enumerate(documents)]
    every = [*documents_of(store), *new]
    need = 1 + sum(len(document) + 1 for document in every if len(document))
    return build_datastore(every, size=store.size if need <= store.size else None)


def documents_of(store: Datastore) -> Iterator[np.ndarray]:
    """Gives the documents of a datastore, in their order.

    Args:
      store: the datastore.

    Yields:
      Ids of a document, int32.
    """
    tokens = np.asarray(store.tokens)
    ends = np.flatnonzero(tokens == SEPARATOR)
    for before, after in zip(ends[:-1], ends[1:], strict=True):
        if after > before + 1:
            yield tokens[before + 1 : after]


def save_datastore(
    path: str | os.PathLike[str], store: Datastore, *, fingerprint: str
) -> None:
    """Writes a datastore as one ``.npz`` file, whole or not at all.

    Args:
      path: the file; one that is there is replaced.
      store: what to write.
      fingerprint: what its ids mean: ``Tokenizer.fingerprint()``.

    Raises:
      OSError: it cannot be written.
    """
    path = Path(path)
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("wb") as file:
        np.savez(
            file,
            format=np.int32(_FORMAT),
            fingerprint=np.str_(fingerprint),
            tokens=np.asarray(store.tokens),
            order=np.asarray(store.order),
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def load_datastore(path: str | os.PathLike[str], *, fingerprint: str) -> Datastore:
    """Reads what ``save_datastore`` wrote, and checks all of it.

    Args:
      path: the file.
      fingerprint: ``Tokenizer.fingerprint()`` of the target's tokenizer.

    Returns:
      The datastore, on the default device, of the size it had.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is broken, of another format, or of another tokenizer; the
        message names the file and the remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no datastore file {path}: make one with "
            "scripts/build_datastore.py."
        )
    content = _read(path)
    if int(content["format"]) != _FORMAT:
        raise ValueError(
            f"{path} is of format {int(content['format'])}; this version reads format "
            f"{_FORMAT}. {_REMEDY}"
        )
    theirs = str(content["fingerprint"])
    if theirs != fingerprint:
        raise ValueError(
            f"{path} holds ids of another tokenizer (fingerprint {theirs:.12}..., the "
            f"model's is {fingerprint:.12}...). Build one with this model's tokenizer."
        )
    tokens, order = content["tokens"], content["order"]
    problem = _problem(tokens, order)
    if problem is not None:
        raise ValueError(f"{path} is damaged: {problem}. {_REMEDY}")
    return Datastore(jnp.asarray(tokens), jnp.asarray(order))


def sort_backwards(tokens: np.ndarray) -> np.ndarray:
    """Sorts positions by the text read backwards from each.

    Args:
      tokens: [N] int32, the first one a separator.

    Returns:
      [N] int32: see ``Datastore.order``.
    """
    size = len(tokens)
    position = np.arange(size)
    separators = np.flatnonzero(tokens < 0)
    rank = np.empty((size,), np.int64)
    # Unique ranks end every comparison at a separator, equal texts by position.
    rank[separators] = np.arange(len(separators))
    _, inverse, counts = np.unique(
        tokens[tokens >= 0], return_inverse=True, return_counts=True
    )
    # A position's rank is the first slot of those that are equal to it so far.
    rank[tokens >= 0] = len(separators) + (np.cumsum(counts) - counts)[inverse]
    open_ = np.flatnonzero(tokens >= 0)
    length = 1
    while len(open_):
        # Equal over ``length`` tokens, none of them a separator: there is one before.
        key = rank[open_] * size + rank[open_ - length]
        sorted_ = np.argsort(key, kind="stable")
        open_, key = open_[sorted_], key[sorted_]
        old = rank[open_]
        index = position[: len(open_)]
        slot = old + index - _first_of_run(old, index)
        rank[open_] = slot[_first_of_run(key, index)]
        twin = np.zeros((len(open_) + 1,), bool)
        twin[1:-1] = key[1:] == key[:-1]
        open_ = open_[twin[1:] | twin[:-1]]
        length *= 2
    order = np.empty((size,), np.int32)
    order[rank] = position
    return order


def _first_of_run(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Index of the first of the equal neighbours that each value is among."""
    fresh = np.ones((len(values),), bool)
    fresh[1:] = values[1:] != values[:-1]
    return np.maximum.accumulate(np.where(fresh, index, 0))


def _check_document(document: Sequence[int] | np.ndarray, number: int) -> np.ndarray:
    ids = np.asarray(document)
    if ids.size == 0:
        return np.zeros((0,), np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"document {number} must be a flat list of ids, got {ids.dtype} of shape "
            f"{ids.shape}."
        )
    if ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError(
            f"document {number} holds ids from {ids.min()} to {ids.max()}; ids are in "
            "[0, 2**31)."
        )
    return ids.astype(np.int32)


def _read(path: Path) -> dict[str, np.ndarray]:
    names = ("format", "fingerprint", "tokens", "order")
    try:
        # NumPy leaves a file open that it opened itself and cannot read.
        with path.open("rb") as file:
            content = np.load(file, allow_pickle=False)
            if not isinstance(content, np.lib.npyio.NpzFile):
                raise ValueError("it is no .npz archive")
            missing = [name for name in names if name not in content]
            if missing:
                raise ValueError(f"it has no array {missing[0]!r}")
            found = {name: content[name] for name in names}
        if found["format"].shape or found["format"].dtype.kind != "i":
            raise ValueError("its format is no whole number")
        return found
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read as a datastore ({error}). {_REMEDY}"
        ) from error


def _problem(tokens: np.ndarray, order: np.ndarray) -> str | None:
    """What is wrong with the arrays of a file, in O(N); None where nothing is."""
    for name, array in (("tokens", tokens), ("order", order)):
        if array.dtype != np.int32 or array.ndim != 1:
            return f"{name} is {array.dtype} of shape {array.shape}, not int32 [N]"
    size = len(tokens)
    if len(order) != size:
        return f"it has {size} tokens and {len(order)} positions"
    if not 1 <= size <= _LARGEST:
        return f"its size {size} is not in [1, 2**30]"
    if tokens.min() < SEPARATOR or tokens[0] >= 0 or tokens[-1] >= 0:
        return "its separators are not where they must be"
    seen = np.zeros((size,), bool)
    inside = (order >= 0) & (order < size)
    seen[order[inside]] = True
    if not seen.all():
        return "its order leaves positions out"
    separators = np.flatnonzero(tokens < 0)
    rest = order[len(separators) :]
    rank = np.empty((size,), np.int64)
    rank[order] = np.arange(size)
    a, b = rest[:-1], rest[1:]
    # Two texts compare as their first tokens do, and where those are equal as the
    # texts before them, whose ranks are known.
    rising = (tokens[a] < tokens[b]) | (
        (tokens[a] == tokens[b]) & (rank[a - 1] < rank[b - 1])
    )
    if not (np.array_equal(order[: len(separators)], separators) and rising.all()):
        return "its order is not sorted"
    return None
