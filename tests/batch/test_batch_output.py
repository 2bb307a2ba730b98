"""The output file: resume, repair, refusals, lock, and kills at any byte."""

import json
import os

import pytest

from specjax.batch import OutputFile, RunError, UsageError

SETTINGS = {"model": "m", "temperature": 0.5, "stop": ["x"], "capacity": None}


def _open(path, settings=SETTINGS, sha256="abc"):
    return OutputFile(path, settings, sha256)


def _record(line, **more):
    return {"id": f"r{line}", "line": line, "turns": [], **more}


def _begun(path, n=3):
    with _open(path) as out:
        out.begin(4)
        for line in range(1, n + 1):
            out.append(_record(line))
    return path.read_bytes()


def test_goes_on_where_it_was(tmp_path):
    path = tmp_path / "out.jsonl"
    _begun(path)
    with _open(path) as out:
        assert {n: d.id for n, d in out.done.items()} == {1: "r1", 2: "r2", 3: "r3"}
        assert (out.n_failed, out.cut_bytes) == (0, 0)
        out.begin(8)
        out.append({"id": "r4", "line": 4, "error": "no"})
        assert out.n_failed == 1
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["settings"] == SETTINGS
    assert [run["batch_size"] for run in meta["runs"]] == [4, 8]
    assert {"specjax", "jax", "platform", "started"} <= set(meta["runs"][0])
    assert not list(tmp_path.glob("*.tmp"))


def test_every_cut_of_the_last_line_is_repaired(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = _begun(path)
    two = whole[: whole.rindex(b"\n", 0, -1) + 1]
    for size in range(len(two) + 1, len(whole)):
        path.write_bytes(whole[:size])
        with _open(path) as out:
            assert sorted(out.done) == [1, 2]
            assert out.cut_bytes == size - len(two)
        assert path.read_bytes() == two


@pytest.mark.parametrize("tail", [b"\0" * 100, b'{"id": "r4", "li\n', b"\xff\xfe"])
def test_what_a_power_cut_leaves_is_repaired(tmp_path, tail):
    path = tmp_path / "out.jsonl"
    whole = _begun(path)
    path.write_bytes(whole + tail)
    with _open(path) as out:
        assert (sorted(out.done), out.cut_bytes) == ([1, 2, 3], len(tail))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b"junk\n" + b, "line 1 is not JSON and more follows"),
        (lambda b: b + b'{"other": 1}\n', "line 4 is no record of this script"),
        (lambda b: b + b.splitlines(True)[0], "line 4 repeats an earlier record"),
    ],
)
def test_an_edited_output_is_refused_and_left_alone(tmp_path, change, message):
    path = tmp_path / "out.jsonl"
    path.write_bytes(change(_begun(path)))
    before = path.read_bytes()
    with pytest.raises(UsageError, match=message):
        _open(path)
    assert path.read_bytes() == before


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "out.jsonl"
    whole = _begun(path)
    path.write_bytes(whole + b"half")
    other = {**SETTINGS, "temperature": 0.7, "stop": []}
    with pytest.raises(UsageError) as caught:
        _open(path, other)
    assert "temperature was 0.5 and is 0.7" in str(caught.value)
    assert 'stop was ["x"] and is []' in str(caught.value)
    assert "model" not in str(caught.value).split("settings:")[1]
    assert path.read_bytes() == whole + b"half"


def test_other_prompts_are_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    _begun(path)
    with pytest.raises(UsageError, match="prompt file is not the one"):
        _open(path, sha256="def")


def test_without_meta_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")
    with pytest.raises(UsageError, match=r"exists without out.jsonl.meta.json"):
        _open(path)
    assert path.read_text() == "mine\n"


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99}', '{"format": 1}'])
def test_meta_that_is_no_meta_is_refused(tmp_path, content):
    path = tmp_path / "out.jsonl"
    _begun(path)
    (tmp_path / "out.jsonl.meta.json").write_text(content)
    with pytest.raises(UsageError, match=r"meta.json .*give another --output"):
        _open(path)


def test_an_empty_output_may_begin_anew(tmp_path):
    path = tmp_path / "out.jsonl"
    _begun(path)
    path.write_bytes(b"")
    with _open(path, {**SETTINGS, "temperature": 0.7}) as out:
        out.begin(1)
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["settings"]["temperature"] == 0.7
    assert len(meta["runs"]) == 1


def test_leaves_nothing_where_nothing_was_written(tmp_path):
    with _open(tmp_path / "out.jsonl") as out:
        out.begin(1)
    assert not list(tmp_path.iterdir())


def test_two_runs_on_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    with _open(path), pytest.raises(UsageError, match="Another run is writing"):
        _open(path)
    _open(path).close()


def test_unwritable(tmp_path):
    with pytest.raises(UsageError, match="is a directory"):
        _open(tmp_path)
    with pytest.raises(UsageError, match="there is no directory"):
        _open(tmp_path / "none" / "out.jsonl")
    with pytest.raises(UsageError, match="no regular file"):
        _open("/dev/null")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(UsageError, match="cannot be written: Permission denied"):
            _open(tmp_path / "locked" / "out.jsonl")


def test_a_full_disk_keeps_what_was_written(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    _begun(path)
    write, calls = os.write, []

    def full(fd, data):
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return write(fd, bytes(data)[:7])

    with _open(path) as out:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(RunError, match=r"No space left.*The 3 records before"):
            out.append(_record(4))
        monkeypatch.undo()
    with _open(path) as out:
        assert (sorted(out.done), out.cut_bytes) == ([1, 2, 3], 7)


def test_one_line_whatever_the_text(tmp_path):
    path = tmp_path / "out.jsonl"
    texts = ["a\nb", "\u2028\u2029\x85\r\x0b\x0c\x1c", "é𝄞", "\0", "\ud800"]
    with _open(path) as out:
        out.begin(1)
        out.append(_record(1, texts=texts))
    text = path.read_bytes().decode("utf-8")
    assert len(text.splitlines()) == 1
    assert "é𝄞" in text
    assert json.loads(text)["texts"] == texts
