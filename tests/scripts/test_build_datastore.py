"""scripts/build_datastore.py as a user runs it, and what it reads."""

import json
import pathlib
import subprocess
import sys

import pytest

from specjax import batch
from specjax.drafters import documents_of, load_datastore
from specjax.testing.tiny import tiny_tokenizer
from specjax.text import Tokenizer

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "build_datastore.py"
TOKENIZER = tiny_tokenizer()


def _ids(*texts):
    return [TOKENIZER.encode(text) for text in texts]


def _jsonl(path, *records):
    lines = (r if isinstance(r, str) else json.dumps(r) for r in records)
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a tokenizer is all that is needed of a model."""
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.save(folder)
    return str(folder)


def _load(path):
    store = load_datastore(path, fingerprint=TOKENIZER.fingerprint())
    return store.size, [document.tolist() for document in documents_of(store)]


def _run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_builds_and_adds(tmp_path, model):
    text = tmp_path / "a.txt"
    text.write_text("\ufeffsome text\nof two lines\n", "utf-8")
    prompts = _jsonl(tmp_path / "b.jsonl", {"prompt": "p"}, {"turns": ["q", "r"]})
    store = tmp_path / "store.npz"
    done = _run(f"--model={model}", f"--output={store}", text, prompts)
    assert done.returncode == 0, done.stderr
    assert "4 documents of 26 tokens, 4 of them new; size 1024" in done.stdout
    wanted = _ids("some text\nof two lines\n", "p", "q", "r")
    assert _load(store) == (1024, wanted)

    answer = {"text": "xy", "ids": TOKENIZER.encode("xy!"), "n_tokens": 3}
    out = _jsonl(tmp_path / "out.jsonl", {"id": "1", "line": 1, "turns": [answer]})
    done = batch.write_datastore([out], store, model=model, append=store)
    assert "5 documents of 29 tokens, 1 of them new; size 1024" in done
    assert _load(store) == (1024, wanted + _ids("xy!"))


def test_refusals_exit_2_and_write_nothing(tmp_path, model):
    done = _run(f"--model={model}", f"--output={tmp_path / 's.npz'}", "/no/file")
    assert done.returncode == 2
    assert "/no/file is no file" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("record", "texts"),
    [
        ({"text": "a"}, ["a"]),
        ({"turns": [{"text": "a"}, {"text": "b", "ids": _ids("b!")[0]}]}, ["a", "b!"]),
        (
            {"samples": [{"turns": [{"text": "a"}]}, {"turns": [{"text": "b"}]}]},
            ["a", "b"],
        ),
        ({"error": "too long", "id": "x", "line": 2}, []),
        ({"error": "turn 2: no", "turns": [{"text": "a"}]}, ["a"]),
        ({"prompt": ""}, [""]),
    ],
)
def test_records(tmp_path, record, texts):
    path = _jsonl(tmp_path / "in.jsonl", "", record)
    assert list(batch.read_documents(path, TOKENIZER)) == _ids(*texts)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a', r"in.jsonl, line 2 is not JSON .*start it again first"),
        ("[]", "line 2: a record is a JSON object"),
        ('{"txt": "a"}', r"none of the keys .* its keys are \['txt'\]"),
        ('{"prompt": 3}', "a turn must be a text, or an answer with one; got 3"),
        ('{"turns": "a"}', '"turns" must be a list'),
        ('{"turns": [{"ids": [1]}]}', "a turn must be a text, or an answer"),
        ('{"turns": [{"text": "a", "ids": 1}]}', '"ids" must be a list'),
        ('{"turns": [{"text": "a", "ids": [256]}]}', "the id 256 has no token"),
        ('{"turns": [{"text": "a", "ids": [true]}]}', "must be integers, got a bool"),
        ('{"turns": [{"text": "ab", "ids": [5, 6]}]}', "Give the --model of that run"),
        ('{"text": "\\ud800"}', "lone surrogate"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = _jsonl(tmp_path / "in.jsonl", {"text": "a"}, line)
    with pytest.raises(batch.UsageError, match=message) as error:
        list(batch.read_documents(path, TOKENIZER))
    assert f"{path}, line 2" in str(error.value)


def test_bad_files_and_flags_are_named(tmp_path, model):
    text, store = tmp_path / "a.txt", tmp_path / "s.npz"
    text.write_text("abc")
    fine = dict(inputs=[text], output=store, model=model)
    write = lambda **changes: batch.write_datastore(**(fine | changes))
    other = tmp_path / "other"
    tiny_tokenizer(200).save(other)
    write(output=tmp_path / "old.npz")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "bad.npz").write_bytes(b"bad")
    for changes, message in [
        (dict(inputs=[]), "Give text or JSONL files"),
        (dict(inputs=[tmp_path]), "is no file"),
        (dict(inputs=[tmp_path / "latin.txt"]), r"latin.txt is not UTF-8 \(byte 3\)"),
        (dict(output=tmp_path / "s.txt"), "must end in .npz"),
        (dict(output=tmp_path / "no" / "s.npz"), "there is no directory .*no; make"),
        (dict(output=tmp_path / "old.npz"), "old.npz exists. Add to it with --append"),
        (dict(append=tmp_path / "absent.npz"), "no datastore file .*absent.npz"),
        (dict(append=tmp_path / "bad.npz"), "bad.npz cannot be read as a datastore"),
        (dict(append=tmp_path / "old.npz", model=str(other)), "another tokenizer"),
        (dict(model=str(tmp_path / "nothing")), "--model=.*nothing"),
        (dict(size=3), r"size=3 must be in \[5, 2\*\*30\]"),
        (dict(size=6, append=tmp_path / "old.npz"), r"size=6 must be in \[9,"),
    ]:
        with pytest.raises(batch.UsageError, match=message):
            write(**changes)
        assert not store.exists()
    write(size=64, append=tmp_path / "old.npz")
    assert _load(store) == (64, _ids("abc", "abc"))


def test_the_tokenizer_of_a_checkpoint_is_found(tmp_path):
    """Beside the weights, as save_orbax and Hugging Face put it."""
    TOKENIZER.save(tmp_path / "tokenizer")
    found = batch.load_tokenizer(str(tmp_path))
    assert found == Tokenizer.from_directory(tmp_path / "tokenizer")
