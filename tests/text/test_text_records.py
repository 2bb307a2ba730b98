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
            "max_drafts": np.int64(0),
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
        "max_drafts": 0,
        "stop": ("a", "b"),
    }
    assert [type(value) for value in checked.values()] == [
        *[float] * 3,
        *[int] * 4,
        tuple,
    ]
    assert check_settings({"max_drafts": None}, "here") == {"max_drafts": None}
    assert check_settings({}, "here") == {}


def test_good_controls_become_plain_values():
    schema = {"properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    checked = check_settings(
        {
            "repetition_penalty": 1,
            "presence_penalty": -2,
            "frequency_penalty": np.float32(0.5),
            "logit_bias": {"0": 1, "17": -2.5, 3: 0.0},
            "banned_ids": [np.int64(4), 5],
            "forced_ids": {"0": 7, "12": 8},
            "min_new_tokens": 0,
            "json_schema": schema,
            "regex": None,
        },
        "here",
    )
    assert checked == {
        "repetition_penalty": 1.0,
        "presence_penalty": -2.0,
        "frequency_penalty": 0.5,
        "logit_bias": {0: 1.0, 17: -2.5, 3: 0.0},
        "banned_ids": (4, 5),
        "forced_ids": {0: 7, 12: 8},
        "min_new_tokens": 0,
        "json_schema": schema,
        "regex": None,
    }
    assert type(checked["repetition_penalty"]) is float
    assert type(checked["banned_ids"][0]) is int
    assert list(checked["json_schema"]["properties"]) == ["b", "a"]
    assert check_settings({"regex": "a+", "json_schema": None}, "here")["regex"] == "a+"


def test_controls_of_a_record(read):
    own = {"regex": "[0-9]+", "logit_bias": {"1": 2}, "forced_ids": {"0": 1}}
    (record,) = read({"prompt": "a", **own, "n": 3})
    assert record.settings == {
        "regex": "[0-9]+",
        "logit_bias": {1: 2.0},
        "forced_ids": {0: 1},
    }
    assert record.extra == {"n": 3}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("repetition_penalty", 0, "above 0 and finite, got 0"),
        ("repetition_penalty", "1", "a number, got '1'"),
        ("presence_penalty", float("inf"), "must be finite, got inf"),
        ("frequency_penalty", float("nan"), "must be finite, got nan"),
        ("min_new_tokens", -1, "at least 0"),
        ("min_new_tokens", 2**31, "at most 2147483647"),
        ("logit_bias", [1], "must be an object, id -> a number, got"),
        ("logit_bias", {"x": 1}, "must have an id as each key, got 'x'"),
        ("logit_bias", {"01": 1}, "must have an id as each key, got '01'"),
        ("logit_bias", {"-1": 1}, "must have an id as each key, got '-1'"),
        ("logit_bias", {True: 1}, "must have an id as each key, got True"),
        ("logit_bias", {"9" * 5000: 1}, "must have an id as each key"),
        ("logit_bias", {"2147483648": 1}, "at most 2147483647"),
        ("logit_bias", {"3": "1"}, r"logit_bias\[3\] must be a number, got '1'"),
        ("logit_bias", {"3": None}, "put it into banned_ids"),
        ("logit_bias", {"3": -float("inf")}, "put it into banned_ids"),
        ("logit_bias", {"3": float("inf")}, "must be finite"),
        ("banned_ids", 3, "must be a list of ids, got 3"),
        ("banned_ids", [1.5], "an integer, got 1.5"),
        ("banned_ids", [-1], "at least 0"),
        ("forced_ids", {"a": 1}, "must have an output position as each key"),
        ("forced_ids", {"0": "1"}, r"forced_ids\[0\] must be an integer"),
        ("regex", "", "non-empty string, got ''"),
        ("regex", 3, "non-empty string, got 3"),
        ("regex", "\ud800", "lone surrogate"),
        ("json_schema", "{}", "must be an object, got '{}'"),
        ("json_schema", {"const": float("nan")}, "is not JSON"),
        ("json_schema", {"const": {1}}, "is not JSON"),
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
        ("max_drafts", -1, "at least 0 and at most 2147483647, got -1"),
        ("max_drafts", 0.5, "an integer, got 0.5"),
        ("max_drafts", False, "an integer, got False"),
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


def test_one_constraint_only():
    both = {"regex": "a", "json_schema": {"type": "null"}}
    with pytest.raises(ValueError, match="here: regex and json_schema exclude one"):
        check_settings(both, "here")
