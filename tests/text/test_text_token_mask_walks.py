"""Masks over the vocabularies of real models."""

import json
import random
import re

import numpy as np
import pytest

from specjax.text import TokenMask

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
    },
    "required": ["name", "age"],
}
ORDER = {
    "$defs": {"price": {"type": "number", "title": "Price"}},
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-\\d{1,3}$"},
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "anyOf": [{"enum": ["tea", 'a "cup"']}, {"$ref": "#/$defs/price"}]
            },
        },
        "note": {"type": ["string", "null"], "minLength": 1, "maxLength": 4},
        "count": {"type": "integer", "minimum": -3, "exclusiveMaximum": 250},
    },
    "required": ["items", "count"],
}


def _is_person(value):
    assert list(value) == ["name", "age"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 20
    assert type(value["age"]) is int


def _is_order(value):
    assert set(value) <= set(ORDER["properties"]) and {"items", "count"} <= set(value)
    assert re.fullmatch(r"[A-Z]{2}-\d{1,3}", value.get("id", "AB-1"))
    assert 1 <= len(value["items"]) <= 3
    for item in value["items"]:
        assert item in ("tea", 'a "cup"') or type(item) in (int, float)
    note = value.get("note")
    assert note is None or 1 <= len(note) <= 4
    assert type(value["count"]) is int and -3 <= value["count"] < 250


def _walk(mask, ends, seed, n_free=12):
    """Random tokens, then the shortest way to an end; gives them without the end."""
    distance = _distances(mask, ends)
    rng = random.Random(seed)
    state, ids = mask.start, []
    while True:
        row = mask.transitions[state]
        allowed = np.flatnonzero(row >= 0)
        allowed = allowed[~np.isin(allowed, ends)]
        stop = len(ids) >= n_free or not len(allowed) or rng.random() < 0.5
        if row[ends[0]] >= 0 and stop:
            return ids
        if len(ids) >= n_free:
            nearest = distance[row[allowed]]
            allowed = allowed[nearest == nearest.min()]
        ids.append(int(rng.choice(allowed)))
        state = row[ids[-1]]


def _distances(mask, ends):
    """How many tokens each state is from one where the text may end."""
    follow = np.zeros((mask.n_states, mask.n_states), bool)
    for state, row in enumerate(mask.transitions):
        follow[state, row[row >= 0]] = True
    distance = np.where((mask.transitions[:, ends] >= 0).any(1), 0, 10**6)
    for n in range(1, mask.n_states):
        near = follow[:, distance < n].any(1)
        if not (near & (distance > n)).any():
            break
        distance[near & (distance > n)] = n
    return distance


def _texts(mask, tokenizer, n):
    ends = list(tokenizer.eos_ids)
    for seed in range(n):
        ids = _walk(mask, ends, seed)
        assert mask.allows([*ids, ends[0], ends[-1]])
        yield tokenizer.decode(ids)


def test_what_a_tokenizer_makes_of_a_member_is_allowed(
    smollm2, bytelevel, metaspace, sentencepiece
):
    texts = ["Hello, world: 42!", "naïve 日本語 😀", "a\n\tb  c", "x"]
    pattern = "|".join(re.escape(text) for text in texts)
    for tokenizer in (smollm2, bytelevel, metaspace, sentencepiece):
        mask = TokenMask.from_regex(pattern, tokenizer, tokenizer.eos_ids)
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert mask.allows([*ids, tokenizer.eos_ids[0]]), (tokenizer, text)
            assert not mask.allows([*ids, ids[0]])


WALKED = [
    r"\d{4}-(?:0[1-9]|1[0-2])-[0-3]\d",
    r"(?:[A-Z][a-zéè]{1,8} ){2}[\U0001F600-\U0001F64F]",
    "[一-龥]{2,3}。",
]


@pytest.mark.parametrize("pattern", WALKED)
@pytest.mark.parametrize("name", ["smollm2", "metaspace"])
def test_walks_through_the_table_match(request, name, pattern):
    tokenizer = request.getfixturevalue(name)
    ends = tokenizer.eos_ids
    mask = TokenMask.from_regex(pattern, tokenizer, ends, vocab_size=50000)
    texts = set(_texts(mask, tokenizer, 20))
    assert len(texts) > 10
    for text in texts:
        assert re.fullmatch(pattern, text), text


def test_smollm2_special_tokens_are_not_text(smollm2):
    mask = TokenMask.from_regex("(?s:.)*", smollm2, smollm2.eos_ids)
    allowed = mask.allowed(mask.start)
    assert allowed[smollm2.eos_ids[0]]
    assert not allowed[sorted(smollm2.special_ids - set(smollm2.eos_ids))].any()
    # Every ordinary token that begins a character.
    assert allowed.sum() > 48000


@pytest.mark.parametrize(
    ("schema", "check"), [(PERSON, _is_person), (ORDER, _is_order)]
)
@pytest.mark.parametrize("name", ["smollm2", "metaspace"])
def test_walks_through_a_schema_are_valid(request, name, schema, check):
    tokenizer = request.getfixturevalue(name)
    mask = TokenMask.from_json_schema(json.dumps(schema), tokenizer, tokenizer.eos_ids)
    texts = set(_texts(mask, tokenizer, 40))
    assert len(texts) > 30
    for text in texts:
        check(json.loads(text))


def test_valid_values_are_allowed(smollm2):
    end = smollm2.eos_ids[0]
    mask = TokenMask.from_json_schema(PERSON, smollm2, [end])
    assert mask.n_states < 256
    for name in ("Zoë", "日本語", 'a "quoted" \\ name', "tab\tand\nline", "", "x" * 20):
        for spaces in ((", ", ": "), (",", ":")):
            value = {"name": name, "age": -12}
            text = json.dumps(value, ensure_ascii=False, separators=spaces)
            assert mask.allows([*smollm2.encode(text), end]), text
    for text in (
        '{"name": "%s", "age": 1}' % ("x" * 21),
        '{"name": "x", "age": 1.5}',
        '{"name": "x", "age": 01}',
        '{"name": "x"}',
        '{"age": 1, "name": "x"}',
        '{"name": "x\ny", "age": 1}',
        '{"name": "x", "age": 1, "more": 2}',
        '{"name": "x", "age": 1',
    ):
        assert not mask.allows([*smollm2.encode(text), end]), text
