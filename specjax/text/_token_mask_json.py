"""JSON schemas as trees: the texts that are valid under them.

A schema describes more texts than a finite table can follow, so each value has few
ways to be written, and what cannot be followed is refused rather than passed over.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specjax.text._token_mask_regex import (
    ANY_CHAR,
    EMPTY,
    Alt,
    Chars,
    Repeat,
    Seq,
    Tree,
    literal,
    optional,
    parse_pattern,
    without,
)
from specjax.text._tokenizer import check_text

# What describes a value and does not constrain it.
_ANNOTATIONS = frozenset(
    "$schema $id $anchor $comment $defs definitions title description default "
    "examples deprecated readOnly writeOnly".split()
)

# What may stand beside each type.
_KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": (),
    "boolean": (),
    "null": (),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}

# What says all about a value, and what may stand beside it.
_WHOLE = {
    "$ref": (),
    "const": ("type",),
    "enum": ("type",),
    "anyOf": (),
    "allOf": (),
}

# How a string writes the characters that it cannot hold as they are. Other control
# characters have the form \u0001, which would double the states of a string.
_ESCAPES = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}
_ESCAPED = sorted({*range(32), *_ESCAPES})

_GAP = optional(literal(" "))
_COMMA = Seq((literal(","), _GAP))
_COLON = Seq((literal(":"), _GAP))
_DIGIT = Chars(((48, 57),))
_NUMBER = parse_pattern(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def schema_tree(schema: Mapping[str, Any] | str) -> Tree:
    """The JSON texts that a schema describes.

    Args:
      schema: the schema, as a mapping or as JSON text.

    Returns:
      Their tree.

    Raises:
      TypeError: `schema` is neither.
      ValueError: it is not JSON, is malformed, or holds what is not supported.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the JSON schema {schema[:60]!r} is not JSON: {error}: give the "
                "schema as a dict, or as JSON text"
            ) from error
    if not isinstance(schema, Mapping):
        raise TypeError(
            "a JSON schema must be a dict or the JSON text of an object, got "
            f"{type(schema).__name__}"
        )
    try:
        return _Reader(schema).tree(schema, "#")
    except RecursionError as error:
        raise ValueError("the JSON schema is nested too deeply: flatten it") from error


class _Reader:
    """Turns the parts of one schema into trees; a path says where a part stands."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._open: list[str] = []

    def tree(self, schema: Any, path: str) -> Tree:
        if schema is False:
            return Alt(())
        if schema is not True and not isinstance(schema, Mapping):
            _fail(path, f"a schema must be an object, got {schema!r}", "correct it")
        schema = {} if schema is True else schema
        keys = set(schema) - _ANNOTATIONS
        for whole, beside in _WHOLE.items():
            if whole in keys:
                _check_keywords(keys - {whole}, beside, f"beside {whole!r}", path)
                return self._whole(whole, schema, path)
        if "type" not in keys:
            self._no_type(keys, path)
        kinds = _types(schema, path)
        known = [word for kind in kinds for word in _KEYWORDS[kind]]
        _check_keywords(keys - {"type"}, known, f"of type {kinds}", path)
        return Alt(tuple(self._typed(kind, schema, path) for kind in kinds))

    def _no_type(self, keys: set[str], path: str) -> NoReturn:
        beside = {word for words in _KEYWORDS.values() for word in words}
        _check_keywords(keys, sorted({"type", *_WHOLE, *beside}), "in a schema", path)
        problem = (
            "there is no 'type'" if keys else "any value is allowed, nested at will"
        )
        _fail(path, problem, f"give its 'type', one or several of {[*_KEYWORDS]}")

    def _whole(self, keyword: str, schema: Mapping[str, Any], path: str) -> Tree:
        value = schema[keyword]
        if keyword == "$ref":
            return self._reference(value, path)
        if keyword == "const":
            return self._values([value], schema, path)
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            _fail(path, f"{keyword} is {value!r}", "give a list that is not empty")
        if keyword == "enum":
            return self._values(value, schema, path)
        if keyword == "allOf" and len(value) > 1:
            _fail(path, "'allOf' with several schemas is not supported", "merge them")
        parts = (self.tree(p, f"{path}/{keyword}/{i}") for i, p in enumerate(value))
        return Alt(tuple(parts))

    def _reference(self, target: Any, path: str) -> Tree:
        if not isinstance(target, str) or not target.startswith("#"):
            _fail(
                path, f"$ref is {target!r}", "refer to a part of the schema: #/$defs/"
            )
        if target in self._open:
            _fail(
                path,
                f"{target} refers to itself, so values may nest without end",
                "write out as many levels as are needed",
            )
        found: Any = self._root
        for step in target[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            in_list = isinstance(found, list) and step.isdecimal()
            key: Any = int(step) if in_list else step
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                _fail(path, f"$ref {target!r} leads to nothing", "define it in $defs")
        self._open.append(target)
        tree = self.tree(found, target)
        self._open.pop()
        return tree

    def _values(
        self, values: Sequence[Any], schema: Mapping[str, Any], path: str
    ) -> Tree:
        kinds = _types(schema, path)
        fitting = [v for v in values if any(_is_of(v, kind) for kind in kinds)]
        if not fitting:
            _fail(path, f"none of {list(values)} is of type {kinds}", "correct either")
        return Alt(tuple(_value(value, path) for value in fitting))

    def _typed(self, kind: str, schema: Mapping[str, Any], path: str) -> Tree:
        if kind == "null":
            return literal("null")
        if kind == "boolean":
            return Alt((literal("true"), literal("false")))
        if kind == "number":
            return _NUMBER
        if kind == "integer":
            return _integer(schema, path)
        if kind == "string":
            return _string(schema, path)
        return (self._array if kind == "array" else self._object)(schema, path)

    def _array(self, schema: Mapping[str, Any], path: str) -> Tree:
        low, high = _counts(schema, "minItems", "maxItems", path)
        if "prefixItems" in schema:
            prefix = schema["prefixItems"]
            if not isinstance(prefix, list | tuple):
                _fail(path, f"prefixItems is {prefix!r}", "give a list of schemas")
            if low > len(prefix) or (high is not None and high < len(prefix)):
                _fail(
                    path,
                    f"prefixItems has {len(prefix)} schemas, but minItems is {low} and "
                    f"maxItems {high}",
                    "make them agree; all of prefixItems are written and no more",
                )
            items = (
                self.tree(item, f"{path}/prefixItems/{i}")
                for i, item in enumerate(prefix)
            )
            return _enclosed("[", _joined(list(items)), "]")
        if high == 0 or schema.get("items") is False and low == 0:
            return _enclosed("[", EMPTY, "]")
        if "items" not in schema:
            _fail(path, "an array without 'items' may hold anything", "give 'items'")
        item = self.tree(schema["items"], f"{path}/items")
        return _enclosed("[", _listed(item, low, high), "]")

    def _object(self, schema: Mapping[str, Any], path: str) -> Tree:
        required = schema.get("required", [])
        properties = schema.get("properties")
        if not isinstance(required, list | tuple):
            _fail(path, f"required is {required!r}", "give a list of names")
        if properties is not None and not isinstance(properties, Mapping):
            _fail(path, f"properties is {properties!r}", "give an object")
        for name in required:
            if name not in list(properties or ()):
                _fail(path, f"{name!r} is required", "describe it in 'properties'")
        more = schema.get("additionalProperties", True)
        if properties is not None:
            members = [
                (self._member(n, part, path), n in required)
                for n, part in properties.items()
            ]
            return _enclosed("{", _members(members), "}")
        if more is False:
            return _enclosed("{", EMPTY, "}")
        if more is True:
            _fail(
                path,
                "an object without 'properties' may hold anything",
                "give 'properties', or a schema as 'additionalProperties'",
            )
        value = self.tree(more, f"{path}/additionalProperties")
        member = Seq((_string({}, path), _COLON, value))
        return _enclosed("{", _listed(member, 0, None), "}")

    def _member(self, name: str, schema: Any, path: str) -> Tree:
        value = self.tree(schema, f"{path}/properties/{name}")
        return Seq((_value(name, path), _COLON, value))


def _fail(path: str, problem: str, remedy: str) -> NoReturn:
    raise ValueError(f"JSON schema at {path}: {problem}: {remedy}")


def _check_keywords(
    keys: set[str], known: Sequence[str], where: str, path: str
) -> None:
    unknown = sorted(keys - set(known), key=str)
    if unknown:
        _fail(
            path,
            f"the keyword {unknown[0]!r} is not supported {where} (supported: "
            f"{', '.join(known) or 'none'})",
            "leave it out, and check the finished value instead",
        )


def _types(schema: Mapping[str, Any], path: str) -> list[str]:
    kinds = schema.get("type", [*_KEYWORDS])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list | tuple) or not kinds:
        _fail(path, f"type is {kinds!r}", f"give one or several of {[*_KEYWORDS]}")
    for kind in kinds:
        if kind not in [*_KEYWORDS]:
            _fail(path, f"the type {kind!r} is unknown", f"use {[*_KEYWORDS]}")
    return list(kinds)


def _counts(
    schema: Mapping[str, Any], lowest: str, highest: str, path: str
) -> tuple[int, int | None]:
    low, high = schema.get(lowest, 0), schema.get(highest)
    for name, value in ((lowest, low), (highest, high)):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not whole and not (name == highest and value is None):
            _fail(path, f"{name} is {value!r}", "give an integer of at least 0")
    if high is not None and low > high:
        _fail(path, f"{lowest} {low} is above {highest} {high}", "correct either")
    return low, high


def _enclosed(left: str, inner: Tree, right: str) -> Tree:
    if inner == EMPTY:
        return Seq((literal(left), _GAP, literal(right)))
    return Seq((literal(left), _GAP, inner, _GAP, literal(right)))


def _joined(parts: Sequence[Tree]) -> Tree:
    commas = [Seq((_COMMA, part)) for part in parts[1:]]
    return Seq((*parts[:1], *commas))


def _listed(item: Tree, low: int, high: int | None) -> Tree:
    """From `low` to `high` of an item, with commas between; `high` is not 0."""
    more = Repeat(
        Seq((_COMMA, item)), max(low - 1, 0), None if high is None else high - 1
    )
    listed = Seq((item, more))
    return listed if low else optional(listed)


def _members(members: list[tuple[Tree, bool]]) -> Tree:
    """The members of an object in their order, of which some may be left out."""
    if not members:
        return EMPTY
    later: list[Tree] = []
    for member, required in members:
        after = Seq((_COMMA, member))
        later.append(after if required else optional(after))
    # Any member may come first that has only ones before it that may be left out.
    starts: list[Tree] = []
    for i, (member, required) in enumerate(members):
        starts.append(Seq((member, *later[i + 1 :])))
        if required:
            return Alt(tuple(starts))
    return Alt((*starts, EMPTY))


def _string(schema: Mapping[str, Any], path: str) -> Tree:
    low, high = _counts(schema, "minLength", "maxLength", path)
    if "pattern" in schema:
        if low or high is not None:
            _fail(path, "'pattern' beside a length is not supported", "use {m,n} in it")
        where = f"JSON schema at {path}: the pattern"
        inner = parse_pattern(schema["pattern"], where)
    else:
        inner = Repeat(ANY_CHAR, low, high)
    return Seq((literal('"'), _inside_string(inner), literal('"')))


def _inside_string(tree: Tree) -> Tree:
    """The same texts as they are written between quotes."""
    if isinstance(tree, Repeat):
        return Repeat(_inside_string(tree.part), tree.low, tree.high)
    if not isinstance(tree, Chars):
        return type(tree)(tuple(_inside_string(part) for part in tree.parts))
    if len(tree.ranges) == 1 and tree.ranges[0][0] == tree.ranges[0][1]:
        return literal(json.dumps(chr(tree.ranges[0][0]), ensure_ascii=False)[1:-1])
    plain = Chars(without(tree.ranges, _ESCAPED))
    held = [
        point
        for point in _ESCAPES
        if any(low <= point <= high for low, high in tree.ranges)
    ]
    return Alt((plain, *(literal(_ESCAPES[point]) for point in held)))


def _value(value: Any, path: str) -> Tree:
    """The ways of writing one value."""
    if isinstance(value, Mapping):
        members = [
            Seq((_value(name, path), _COLON, _value(part, path)))
            for name, part in value.items()
        ]
        return _enclosed("{", _joined(members), "}")
    if isinstance(value, list | tuple):
        return _enclosed("[", _joined([_value(part, path) for part in value]), "]")
    if isinstance(value, str):
        check_text(value, f"JSON schema at {path}: {value!r}")
    try:
        return literal(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        _fail(path, f"{value!r} is no JSON value ({error})", "replace it")


def _is_of(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        if isinstance(value, float):
            return kind == "number" or value.is_integer()
        return isinstance(value, int) and not isinstance(value, bool)
    types = {
        "string": str,
        "boolean": bool,
        "null": type(None),
        "array": list | tuple,
        "object": Mapping,
    }
    return kind in types and isinstance(value, types[kind])


def _integer(schema: Mapping[str, Any], path: str) -> Tree:
    """The integers within the bounds of a schema."""
    bounds: dict[str, int | None] = {}
    for word in _KEYWORDS["integer"]:
        value = schema.get(word)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not whole:
            _fail(path, f"{word} is {value!r}", "give an integer")
        bounds[word] = value
    lows = [bounds["minimum"], _shifted(bounds["exclusiveMinimum"], 1)]
    highs = [bounds["maximum"], _shifted(bounds["exclusiveMaximum"], -1)]
    low = max((b for b in lows if b is not None), default=None)
    high = min((b for b in highs if b is not None), default=None)
    if low is not None and high is not None and low > high:
        _fail(path, f"no integer is from {low} to {high}", "correct the bounds")
    parts = []
    if high is None or high >= 0:
        parts.append(_natural(max(low or 0, 0), high))
    if low is None or low < 0:
        # The digits after a minus sign, from the bound next to zero on.
        nearest = 1 if high is None else max(-high, 1)
        below = _natural(nearest, None if low is None else -low)
        parts.append(Seq((literal("-"), below)))
    return Alt(tuple(parts))


def _shifted(bound: int | None, by: int) -> int | None:
    return None if bound is None else bound + by


def _natural(low: int, high: int | None) -> Tree:
    """The natural numbers from `low` to `high`, None for no end."""
    parts = []
    n = len(str(low))
    last = n if high is None else len(str(high))
    for length in range(n, last + 1):
        start = str(low) if length == n else "1" + "0" * (length - 1)
        stop = str(high) if high is not None and length == last else "9" * length
        parts.append(_digits(start, stop))
    if high is None:
        parts.append(Seq((Chars(((49, 57),)), Repeat(_DIGIT, n, None))))
    return Alt(tuple(parts))


def _digits(start: str, stop: str) -> Tree:
    """The numerals from `start` to `stop`, which are of one length."""
    if start == "0" * len(start) and stop == "9" * len(stop):
        return Repeat(_DIGIT, len(start), len(start))
    first, last = ord(start[0]), ord(stop[0])
    n = len(start) - 1
    if first == last:
        return Seq((literal(start[0]), _digits(start[1:], stop[1:])))
    parts = [
        Seq((literal(start[0]), _digits(start[1:], "9" * n))),
        Seq((literal(stop[0]), _digits("0" * n, stop[1:]))),
    ]
    if first + 1 < last:
        between = Chars(((first + 1, last - 1),))
        parts.append(Seq((between, Repeat(_DIGIT, n, n))))
    return Alt(tuple(parts))
