import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from specjax.text import BadRecord, Record, check_settings, read_records


@pytest.fixture
def read(tmp_path):
    def run(*lines):
        file = tmp_path / "prompts.jsonl"
        file.write_bytes(b"\n".join(map(to_bytes, lines)))
        return list(read_records(file))

    return run


def to_bytes(line):
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode("utf-8")


def test_records(read):
    records = read(
        {"id": "a", "prompt": "Hi", "temperature": 1, "stop": ["\n"], "meta": {"k": 1}},
        {"turns": ["One", "Two"], "category": "chat", "reference": ["x"]},
    )
    settings = {"temperature": 1.0, "stop": ("\n",)}
    assert records == [
        Record(1, "a", ("Hi",), settings, {"meta": {"k": 1}}),
        Record(
            2, "line-2", ("One", "Two"), {}, {"category": "chat", "reference": ["x"]}
        ),
    ]


def test_blank_lines_are_passed_over_and_counted(read):
    records = read("", {"prompt": "a"}, "  \t", b"\r", {"prompt": "b"}, "")
    assert [(r.line, r.id) for r in records] == [(2, "line-2"), (5, "line-5")]


def test_line_ends_and_byte_order_mark(read):
    line = json.dumps({"prompt": "é\u2028x"}, ensure_ascii=False).encode()
    records = read(b"\xef\xbb\xbf" + line + b"\r", line)
    assert [r.turns for r in records] == [("é\u2028x",)] * 2


def test_reads_line_by_line(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\nnonsense\n{"prompt": "b"}\n')
    records = read_records(str(file))
    assert next(records).turns == ("a",)
    assert isinstance(next(records), BadRecord)
    assert next(records).turns == ("b",)
    assert list(records) == []


def test_empty_file(read):
    assert read(b"") == []


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no prompt file at .*nowhere\.jsonl"):
        read_records(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="is a directory"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: .* at character 2"),
        ("hello", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at position 12"),
        ('{"prompt": "a", "prompt": "b"}', "key 'prompt' is there twice"),
        ([1], "must be a JSON object, got a list"),
        ("3", "got a number"),
        ("null", "got null"),
        ("true", "got a boolean"),
        ('"Hi"', "got a string"),
        ({}, r"has no 'prompt' and no 'turns'; its keys are \[\]"),
        ({"text": "Hi"}, r"its keys are \['text'\]"),
        ({"prompt": "a", "turns": ["b"]}, "has both 'turns' and 'prompt'"),
        ({"prompt": 3}, "prompt must be a string, got a number"),
        ({"prompt": None}, "prompt must be a string, got null"),
        ({"prompt": ""}, "prompt is blank"),
        ({"prompt": " \n"}, "prompt is blank"),
        ({"turns": "Hi"}, "turns must be a list of strings, got a string"),
        ({"turns": []}, "turns is empty"),
        ({"turns": ["a", ""]}, r"turns\[1\] is blank"),
        ({"turns": ["a", {}]}, r"turns\[1\] must be a string, got an object"),
        ({"prompt": "a\ud800"}, r"prompt holds the lone surrogate U\+D800"),
        ({"id": 3, "prompt": "a"}, "id must be a string, got a number 3"),
        ({"id": " ", "prompt": "a"}, "id is blank"),
        ({"id": "\udc00", "prompt": "a"}, "id holds the lone surrogate"),
        ({"prompt": "a", "top_k": 1.5}, "settings: top_k must be an integer"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be .* finite"),
        ('{"prompt": "a", "temperature": 1e999}', "temperature must be .* finite"),
        ('{"prompt": "a", "seed": ' + "9" * 5000 + "}", "[Ee]xceeds the limit"),
        ({"prompt": "a", "stop": "x"}, "stop must be a list of strings, got 'x'"),
    ],
)
def test_bad_lines_do_not_stop_the_reading(read, line, message):
    records = read({"prompt": "before"}, line, {"prompt": "after"})
    assert [type(r) for r in records] == [Record, BadRecord, Record]
    bad = records[1]
    assert (bad.line, bad.id) == (2, "line-2")
    with pytest.raises(ValueError, match=message):
        raise ValueError(bad.error)


def test_bad_line_keeps_its_id(read):
    assert read({"id": "q1", "prompt": 3})[0].id == "q1"


def test_repeated_ids(read):
    records = read(
        {"id": "a", "prompt": "x"},
        {"id": "line-3", "prompt": "y"},
        {"prompt": "z"},
        {"id": "a", "prompt": ""},
        {"id": "a", "prompt": "w"},
    )
    assert [type(r) for r in records] == [Record, Record] + [BadRecord] * 3
    assert "id 'line-3' was already used in line 2" in records[2].error
    assert "blank" in records[3].error and "in line 1" in records[3].error
    assert "id 'a' was already used in line 1" in records[4].error


@hypothesis.settings(
    deadline=None,
    max_examples=100,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(data=st.binary(max_size=60))
def test_no_bytes_raise(tmp_path, data):
    file = tmp_path / "any.jsonl"
    file.write_bytes(data)
    lines = [line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n")]
    assert len(list(read_records(file))) == sum(bool(line.strip()) for line in lines)


def test_good_settings_become_plain_values():
    checked = check_settings(
        {
            "temperature": np.float32(0.5),
            "top_p": 1,
            "min_p": 0,
            "top_k": np.int64(0),
            "seed": 2**32 - 1,
            "max_new_tokens": 1,
            "stop": ["a", "b"],
        },
        "here",
    )
    assert checked == {
        "temperature": 0.5,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_k": 0,
        "seed": 2**32 - 1,
        "max_new_tokens": 1,
        "stop": ("a", "b"),
    }
    assert [type(value) for value in checked.values()] == [
        *[float] * 3,
        *[int] * 3,
        tuple,
    ]
    assert check_settings({}, "here") == {}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "at least 0 and finite, got -0.1"),
        ("temperature", float("inf"), "at least 0 and finite"),
        ("temperature", float("nan"), "at least 0 and finite"),
        ("temperature", 10**400, "at least 0 and finite"),
        ("temperature", True, "a number, got True"),
        ("temperature", "1", "a number, got '1'"),
        ("temperature", None, "a number, got None"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("min_p", 1, "at least 0 and below 1"),
        ("min_p", -1, "at least 0 and below 1"),
        ("top_k", -1, "at least 0, got -1"),
        ("top_k", 1.0, "an integer, got 1.0"),
        ("top_k", True, "an integer, got True"),
        ("seed", 2**32, "at least 0 and at most 4294967295"),
        ("seed", -1, "at least 0"),
        ("max_new_tokens", 0, "at least 1, got 0"),
        ("stop", "x", "a list of strings"),
        ("stop", [""], "non-empty strings, got ''"),
        ("stop", [3], "non-empty strings, got 3"),
        ("stop", ["\ud800"], "lone surrogate"),
        ("temprature", 1, r"unknown setting 'temprature'; known are .*'temperature'"),
    ],
)
def test_bad_settings(name, value, message):
    with pytest.raises(ValueError, match=message) as error:
        check_settings({name: value}, "record q7")
    assert str(error.value).startswith("record q7: ")
    assert name in str(error.value)
