import functools
import itertools
import json

import pytest

from specjax.testing import tiny_tokenizer
from specjax.text import TokenMask

TOKENIZER = tiny_tokenizer()
# The last id is a byte that UTF-8 has no use for.
END = 255


def _mask(schema, **options):
    return TokenMask.from_json_schema(schema, TOKENIZER, [END], **options)


@functools.cache
def _ids(char):
    return TOKENIZER.encode(char)


def _accepts(mask, text):
    return mask.allows([*(i for char in text for i in _ids(char)), END])


BOUNDS = [
    (None, None),
    (0, None),
    (None, 0),
    (-3, 12),
    (7, 7),
    (98, 1203),
    (-120, -15),
    (10, None),
    (None, -10),
]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
@pytest.mark.parametrize("exclusive", [False, True])
def test_integers_keep_their_bounds(low, high, exclusive):
    words = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ()
    words = words or ("minimum", "maximum")
    by = 1 if exclusive else 0
    shifted = (None if low is None else low - by, None if high is None else high + by)
    bounds = {w: b for w, b in zip(words, shifted, strict=True) if b is not None}
    mask = _mask({"type": "integer", **bounds})
    for n in range(-1300, 1301):
        inside = (low is None or n >= low) and (high is None or n <= high)
        assert _accepts(mask, str(n)) == inside, n
    for text in ("", "-", "-0", "00", "01", "-01", "+1", "1.0", "1e2"):
        assert not _accepts(mask, text), text


def test_members_that_may_be_left_out():
    names = "abcd"
    for required in itertools.chain.from_iterable(
        itertools.combinations(names, n) for n in range(3)
    ):
        schema = {
            "type": "object",
            "properties": {name: {"type": "null"} for name in names},
            "required": list(required),
        }
        mask = _mask(schema)
        for n in range(len(names) + 1):
            for present in itertools.permutations(names, n):
                text = json.dumps(dict.fromkeys(present))
                fits = set(required) <= set(present) and list(present) == sorted(
                    present
                )
                assert _accepts(mask, text) == fits, (required, text)
        assert not _accepts(mask, '{"a": null,}')
        assert not _accepts(mask, '{,"a": null}')


CASES = [
    ({"type": "null"}, ["null"], ["nul", "None"]),
    ({"type": "boolean"}, ["true", "false"], ["True"]),
    (
        {"type": "number"},
        ["0", "-1.50", "2e5", "3.1E-7", "1e+2"],
        ["01", ".5", "1.", "--1", "e1", "NaN"],
    ),
    (
        {"const": {"a": [1, "é", None]}},
        ['{"a":[1,"é",null]}', '{ "a": [1, "é", null] }'],
        ["{}"],
    ),
    (
        {"enum": ["a", 1, 2.5, None], "type": ["string", "integer"]},
        ['"a"', "1"],
        ["2.5"],
    ),
    ({"enum": ["\u0001"]}, ['"\\u0001"'], ['"\u0001"']),
    (
        {"type": "string"},
        ['""', '"\\b\\f\\n\\r\\t\\"\\\\/"', '"\x7f😀"'],
        ['"\n"', '"\\x"'],
    ),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"é\\n"', '"abc"'], ['"a"']),
    (
        {"type": "string", "pattern": 'a|b"|[\\n"\\\\]{2}'},
        ['"b\\""', '"\\n\\\\"'],
        ['"b""'],
    ),
    ({"type": "array", "items": {"type": "null"}}, ["[]", "[null, null]"], ["[null,]"]),
    (
        {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 3},
        ["[1,1]", "[ 1, 1, 1 ]"],
        ["[]", "[1]", "[1,1,1,1]"],
    ),
    ({"type": "array", "items": {"const": 1}, "maxItems": 1}, ["[]", "[1]"], ["[1,1]"]),
    ({"type": "array", "maxItems": 0}, ["[]", "[ ]"], ["[1]"]),
    ({"type": "array", "items": False}, ["[]"], ["[1]"]),
    (
        {
            "type": "array",
            "prefixItems": [{"const": 1}, {"const": "a"}],
            "items": False,
        },
        ['[1, "a"]'],
        ["[1]", '["a", 1]', '[1,"a",1]'],
    ),
    ({"type": "array", "prefixItems": []}, ["[]"], ["[1]"]),
    ({"type": "object", "properties": {}}, ["{}", "{ }"], ['{"a":1}']),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ["{}", '{"a": 1, "\\"": -2}'],
        ['{"a":}', "{a: 1}", '{"a": null}'],
    ),
    (
        {"type": "object", "properties": {'q"\n': {"const": 0}}},
        ['{"q\\"\\n": 0}'],
        ['{"q"":0}'],
    ),
    ({"type": "object", "properties": {"a": False}}, ["{}"], ['{"a":1}']),
    (
        {"allOf": [{"$ref": "#/$defs/x~1y"}], "$defs": {"x/y": {"const": 1}}},
        ["1"],
        ["2"],
    ),
    ({"$ref": "#/$defs/l/1", "$defs": {"l": [True, {"const": 1}]}}, ["1"], ["2"]),
    ({"anyOf": [{"const": 1}, {"const": 12}], "default": 1}, ["1", "12"], ["2", "112"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES)
def test_each_keyword(schema, valid, invalid):
    mask = _mask(schema)
    for text in valid:
        json.loads(text)
        assert _accepts(mask, text), text
    for text in invalid:
        assert not _accepts(mask, text), text


def test_alternatives_that_end_alike_share_states():
    parts = {name: {"type": "string", "maxLength": 20} for name in "abcdef"}
    schema = {"type": "object", "properties": parts}
    needed = _mask({**schema, "required": [*parts]}, max_states=2000)
    free = _mask(schema, max_states=2000)
    assert free.n_states < 1.1 * needed.n_states


def test_an_object_may_have_many_members():
    parts = {f"k{i}": {"type": "null"} for i in range(300)}
    mask = _mask({"type": "object", "properties": parts}, max_states=6000)
    assert _accepts(mask, json.dumps(dict.fromkeys(parts)))
    assert _accepts(mask, '{"k7": null, "k299": null}')
    assert not _accepts(mask, '{"k7": null, "k6": null}')


DEEP = {"const": 1}
for _ in range(2000):
    DEEP = {"anyOf": [DEEP]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", r"'{' is not JSON: Expecting.*give the schema as a dict"),
        ({"type": "integer", "multipleOf": 3}, "at #: the keyword 'multipleOf' is not"),
        (
            {"type": "string", "minimum": 3},
            r"'minimum'.*supported: minLength, maxLength",
        ),
        ({"type": "string", "format": "date"}, "'format'.*leave it out"),
        ({"oneOf": [{"const": 1}]}, "the keyword 'oneOf' is not supported"),
        (
            {"anyOf": [{"const": 1}], "type": "null"},
            "'type' is not supported beside 'anyOf'",
        ),
        ({"allOf": [{"const": 1}, {"const": 2}]}, "'allOf' with several.*merge"),
        ({"enum": []}, r"enum is \[\].*not empty"),
        ({"enum": [1], "type": "string"}, r"none of \[1\] is of type"),
        ({"const": float("nan")}, "nan is no JSON value"),
        ({}, "any value is allowed.*give its 'type'"),
        ({"minLength": 2}, "there is no 'type'"),
        ({"type": "text"}, "the type 'text' is unknown: use"),
        ({"type": []}, r"type is \[\]"),
        ({"type": [["null"]]}, r"the type \['null'\] is unknown"),
        ({"const": 1, "type": 3}, "type is 3: give one or several of"),
        (
            {"properties": {"a": 3}, "type": "object"},
            "#/properties/a: a schema must be",
        ),
        ({"type": "object"}, "may hold anything: give 'properties'"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "'a' is required"),
        ({"type": "object", "properties": {}, "required": "a"}, "required is 'a'"),
        ({"type": "object", "properties": []}, r"properties is \[\]"),
        ({"type": "array"}, "an array without 'items'"),
        (
            {"type": "array", "prefixItems": [{"const": 1}], "minItems": 2},
            "make them agree",
        ),
        ({"type": "array", "prefixItems": 1}, "prefixItems is 1"),
        ({"type": "array", "items": {"const": 1}, "minItems": -1}, "minItems is -1"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "minLength 2 is above"),
        ({"type": "string", "pattern": "a", "maxLength": 1}, "beside a length"),
        (
            {"type": "string", "pattern": "("},
            "at #: the pattern '\\(' is not a regular",
        ),
        ({"type": "string", "pattern": "(?=a)"}, "at #: the pattern.*a lookahead"),
        ({"type": "integer", "minimum": 1.5}, "minimum is 1.5: give an integer"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "no integer is from 2 to 1"),
        ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, "refers to itself.*write out"),
        (DEEP, "nested too deeply"),
        ({"$ref": "#/$defs/x"}, "leads to nothing: define it"),
        ({"$ref": "other.json"}, "refer to a part of the schema"),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            "JSON schema .*matches no text at all",
        ),
        ({"type": "string", "maxLength": 900}, "more than max_states=1024: lower"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        _mask(schema)


def test_schemas_of_another_type_are_refused():
    for schema in ([], 3, None):
        with pytest.raises(TypeError, match="a JSON schema must be a dict"):
            _mask(schema)
    with pytest.raises(TypeError, match="got list"):
        _mask("[]")


def test_a_schema_needs_an_end_id():
    with pytest.raises(ValueError, match=r"JSON schema .*eos_ids is empty"):
        TokenMask.from_json_schema({"type": "null"}, TOKENIZER, [])
