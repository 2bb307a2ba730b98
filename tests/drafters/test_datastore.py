"""The datastore: its order, its growth, its file."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.drafters import (
    build_datastore,
    documents_of,
    extend_datastore,
    load_datastore,
    save_datastore,
)

MEANING = "f" * 64
TEXTS = [[1, 2, 3, 1, 2], [], [3, 1, 2, 3], [1, 2, 3, 1, 2]]


def sorted_positions(tokens):
    """Separators first, then by the text read backwards, equal texts by position."""

    def key(position):
        if tokens[position] < 0:
            return (0, [], position)
        back = []
        for token in tokens[position::-1]:
            if token < 0:
                break
            back.append(token)
        return (1, back, position)

    return sorted(range(len(tokens)), key=key)


def _lists(documents):
    return [document.tolist() for document in documents]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_order_equals_sorted(data):
    letters = st.integers(0, data.draw(st.integers(0, 3)))
    documents = data.draw(st.lists(st.lists(letters, max_size=40), max_size=4))
    room = data.draw(st.integers(0, 9))
    need = 1 + sum(len(d) + 1 for d in documents if d)
    store = build_datastore(documents, size=need + room)
    tokens = np.asarray(store.tokens).tolist()
    assert np.asarray(store.order).tolist() == sorted_positions(tokens)
    assert _lists(documents_of(store)) == [d for d in documents if d]
    if documents:
        later = extend_datastore(store, documents[:1])
        tokens = np.asarray(later.tokens).tolist()
        assert np.asarray(later.order).tolist() == sorted_positions(tokens)
        assert _lists(documents_of(later)) == [d for d in documents if d] + [
            d for d in documents[:1] if d
        ]


def test_a_long_text_of_large_ids_is_sorted():
    rng = np.random.default_rng(0)
    page = rng.integers(0, 2**31 - 1, 400)
    store = build_datastore([np.tile(page, 3), page, [7] * 500])
    tokens = np.asarray(store.tokens).tolist()
    assert np.asarray(store.order).tolist() == sorted_positions(tokens)


def test_the_size_stays_until_it_overflows():
    store = build_datastore([])
    assert store.size == 1024 and _lists(documents_of(store)) == []
    for n in range(1, 11):
        store = extend_datastore(store, [[n] * 101])
        assert store.size == 1024
    store = extend_datastore(store, [[0]])
    assert store.size == 1024
    store = extend_datastore(store, [[1, 2]])
    assert store.size == 2048
    assert len(_lists(documents_of(store))) == 12
    odd = build_datastore([[1, 2]], size=4)
    assert extend_datastore(odd, []).size == 4
    assert extend_datastore(odd, [[3]]).size == 1024


@pytest.mark.parametrize(
    ("documents", "size", "message"),
    [
        ([[1], [2, -1]], None, "document 1 holds ids from -1 to 2"),
        ([[2**31]], None, "document 0 holds ids from 2147483648"),
        ([[1.5]], None, "document 0 must be a flat list of ids, got float64"),
        ([[[1]]], None, "document 0 must be a flat list of ids, got int64 of shape"),
        ([[1, 2], [3]], 5, r"size=5 must be in \[6, 2\*\*30\]"),
        ([], 2**30 + 1, r"must be in \[1, 2\*\*30\]"),
    ],
)
def test_documents_are_checked(documents, size, message):
    with pytest.raises(ValueError, match=message):
        build_datastore(documents, size=size)


def test_a_file_gives_back_what_was_saved(tmp_path):
    path = tmp_path / "store.npz"
    store = build_datastore(TEXTS, size=77)
    for _ in range(2):  # it replaces what is there
        save_datastore(path, store, fingerprint=MEANING)
    again = load_datastore(path, fingerprint=MEANING)
    np.testing.assert_array_equal(again.tokens, store.tokens)
    np.testing.assert_array_equal(again.order, store.order)
    assert [p.name for p in tmp_path.iterdir()] == ["store.npz"]


def _changed(**arrays):
    """Writes a datastore file in which some arrays are others, or lack."""

    def write(path):
        store = build_datastore(TEXTS, size=32)
        content = dict(
            format=np.int32(1),
            fingerprint=np.str_(MEANING),
            tokens=np.asarray(store.tokens),
            order=np.asarray(store.order),
        )
        for name, change in arrays.items():
            content[name] = change(content[name].copy())
        np.savez(path, **{k: v for k, v in content.items() if v is not None})

    return write


def _put(index, value):
    def change(array):
        array[index] = value
        return array

    return change


def _swapped(array):
    array[[-1, -2]] = array[[-2, -1]]
    return array


def _cut(path):
    _changed()(path)
    path.write_bytes(path.read_bytes()[:-300])


def _flipped(path):
    _changed()(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def _one_array(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_text("tokens"), "cannot be read"),
        (_one_array, "it is no .npz archive"),
        (_cut, "cannot be read"),
        (_flipped, "damaged|cannot be read"),
        (_changed(order=lambda a: None), "it has no array 'order'"),
        (_changed(tokens=lambda a: a.astype(object)), "cannot be read"),
        (_changed(format=lambda a: np.int32(2)), "format 2; this version reads"),
        (_changed(format=lambda a: np.str_("1")), "its format is no whole number"),
        (_changed(fingerprint=lambda a: np.str_("0" * 64)), "another tokenizer"),
        (_changed(tokens=lambda a: a.astype(np.int64)), "tokens is int64"),
        (_changed(order=lambda a: a[None]), r"order is int32 of shape \(1, 32\)"),
        (_changed(order=lambda a: a[1:]), "32 tokens and 31 positions"),
        (_changed(tokens=lambda a: a[:0], order=lambda a: a[:0]), "size 0"),
        (_changed(tokens=_put(0, 5)), "separators are not where"),
        (_changed(tokens=_put(-1, 5)), "separators are not where"),
        (_changed(tokens=_put(3, -2)), "separators are not where"),
        (_changed(order=_put(3, 10**6)), "leaves positions out"),
        (_changed(order=_swapped), "its order is not sorted"),
        (_changed(tokens=_put(2, 9)), "its order is not sorted"),
    ],
)
def test_a_bad_file_is_named_with_the_remedy(tmp_path, write, message):
    path = tmp_path / "bad.npz"
    write(path)
    with pytest.raises(ValueError, match=message) as error:
        load_datastore(path, fingerprint=MEANING)
    assert str(path) in str(error.value)
    assert "build_datastore.py" in str(error.value) or "Build" in str(error.value)


def test_a_missing_file_is_named_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.npz: make one with scripts"):
        load_datastore(tmp_path / "absent.npz", fingerprint=MEANING)
    with pytest.raises(FileNotFoundError, match="make one with"):
        load_datastore(tmp_path, fingerprint=MEANING)
