"""Controls in runs: as ``generate`` gives them, own ones, errors, samples, resume."""

import dataclasses
import io
import json
import re

import pytest

from specjax import generate, load
from specjax.batch import BatchSettings, Files, UsageError, main, run_prompt
from specjax.batch import _constraints as constraints_module
from specjax.batch._constraints import Constraints
from specjax.batch._prepare import Preparer
from specjax.decode import Controls, Engine
from specjax.sampling import ControlSpec
from specjax.testing.tiny import tiny_model
from specjax.text import Record, TokenMask, check_settings

# Readable characters are ids 0 to 94 of the tiny tokenizer, "'" (7) is the end id.
DIGITS = "[0-9]{2,5}"
SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "boolean"}, "a": {"enum": ["x", "y"]}},
    "required": ["b", "a"],
}
OWN = [
    {},
    {"repetition_penalty": 1.8, "frequency_penalty": 0.5, "presence_penalty": 1},
    {"logit_bias": {"5": 40, "6": 39.5}},
    {"banned_ids": [*range(100, 256)]},
    {"forced_ids": {"0": 33, "3": 34}},
    {"min_new_tokens": 10, "stop": ["a"]},
    {"regex": DIGITS},
    {"json_schema": SCHEMA},
    {"regex": DIGITS, "seed": 5},
    {"json_schema": SCHEMA, "logit_bias": {"24": 1}},
]
# A record with which runs carry all controls, and share what is compiled. They also
# have constraints that make a table of 64 states.
ALL = {
    "prompt": "x",
    "max_new_tokens": 1,
    "repetition_penalty": 2,
    "banned_ids": [9],
    "forced_ids": {"0": 1},
    "min_new_tokens": 1,
    "regex": None,
}


@pytest.fixture
def settings(plain_model):
    return BatchSettings(
        model=str(plain_model),
        dtype="float32",
        gamma=3,
        max_new_tokens=24,
        exact=True,
        batch_size=2,
        temperature=0.9,
    )


@pytest.fixture(scope="module")
def tiny():
    return tiny_model(eos_ids=(7,))


def _run(settings, prompts, output):
    return main(settings, Files(prompts=str(prompts), output=str(output)))


def _turns(results):
    return {r["line"]: r["turns"][0] for r in results if "turns" in r}


def _text(id_):
    return chr(32 + id_)


@pytest.fixture
def engines(monkeypatch):
    """What engines were made with."""
    made = []
    init = Engine.__init__

    def noted(engine, model, **options):
        made.append(options)
        init(engine, model, **options)

    monkeypatch.setattr(Engine, "__init__", noted)
    return made


def test_records_are_what_generate_gives(settings, write, read, tmp_path, engines):
    prompts = write(*({"prompt": f"{i} ab", **own} for i, own in enumerate(OWN)))
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 0
    turns = _turns(read(out))
    model = load(settings.model)
    masks = engines[0]["token_masks"]
    assert [mask.name.split()[0] for mask in masks] == ["regex", "JSON"]
    assert engines[0]["controls"] == ControlSpec(True, True, True, True, 0)
    controls = []
    for own in OWN:
        given = {k: v for k, v in own.items() if k in vars(Controls())}
        for name in {"logit_bias", "forced_ids"} & set(given):
            given[name] = {int(k): v for k, v in given[name].items()}
        mask = (
            masks[0] if "regex" in own else masks[1] if "json_schema" in own else None
        )
        controls.append(Controls(**given, token_mask=mask))
    expected = generate(
        model,
        [f"{i} ab" for i in range(len(OWN))],
        batch_size=2,
        gamma=3,
        max_new_tokens=24,
        exact=True,
        temperature=0.9,
        seed=[own.get("seed", 0) for own in OWN],
        controls=controls,
    )
    for i, (own, completion) in enumerate(zip(OWN, expected, strict=True)):
        if "stop" not in own:
            assert turns[i + 1]["ids"] == list(completion.ids), own
    assert set(turns[3]["ids"]) <= {5, 6, 7}
    assert max(turns[4]["ids"]) < 100
    assert (turns[5]["ids"][0], turns[5]["ids"][3]) == (33, 34)
    assert turns[6]["n_tokens"] >= 10
    for line in (7, 9):
        assert re.fullmatch(DIGITS, turns[line]["text"].removesuffix(_text(7)))
    for line in (8, 10):
        value = json.loads(turns[line]["text"].removesuffix(_text(7)))
        assert list(value) == ["b", "a"]
    results = {r["line"]: r for r in read(out)}
    for i, own in enumerate(OWN):
        assert results[i + 1].get("settings", {}) == own


def test_own_settings_win(settings, write, read, tmp_path):
    settings = dataclasses.replace(
        settings, json_schema=SCHEMA, banned_ids=(24,), logit_bias={26: 60.0}
    )
    prompts = write(
        {"prompt": "a", "regex": DIGITS, "logit_bias": {}},
        {"prompt": "a", "regex": DIGITS},
        {"prompt": "a", "regex": DIGITS, "banned_ids": [26]},
        {"prompt": "a"},
        {"prompt": "a", "regex": None, "max_new_tokens": 2},
        ALL,
    )
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 0
    texts = {i: t["text"].removesuffix("'") for i, t in _turns(read(out)).items()}
    assert all(re.fullmatch(DIGITS, texts[line]) for line in (1, 2, 3))
    assert "8" not in texts[1] + texts[2]
    assert set(json.loads(texts[4])) == {"a", "b"}
    assert texts[5] == "::"
    assert texts[6] == "!"


def test_engines_carry_what_is_named(tiny):
    def needs(*own, **flags):
        preparer = Preparer(tiny, BatchSettings(**flags), width=4)
        records = [
            Record(i, f"{i}", ("a",), check_settings(o, ""), {})
            for i, o in enumerate(own)
        ]
        found = preparer.needs(records)
        return found.controls, len(found.token_masks)

    assert needs({}, {"regex": None}) == (ControlSpec(), 0)
    assert needs({"banned_ids": [1]}, {}) == (ControlSpec(bias=True), 0)
    assert needs({}, min_new_tokens=2) == (ControlSpec(min_new=True), 0)
    assert needs({"regex": "a"}, {"regex": "b"}, {"regex": "a"}) == (ControlSpec(), 2)
    assert needs({"min_new_tokens": 0}, min_new_tokens=2) == (ControlSpec(), 0)
    assert needs({"presence_penalty": 1}, {"forced_ids": {0: 1}}) == (
        ControlSpec(penalties=True, forced=True),
        0,
    )
    # Refused records ask for nothing.
    refused = [{"max_new_tokens": 900}, {"banned_ids": [256]}, {"regex": "("}]
    assert needs(*({"banned_ids": [1], **own} for own in refused), capacity=99) == (
        ControlSpec(bias=True),
        0,
    )
    assert needs(*({"banned_ids": [1], **own} for own in refused)) == (ControlSpec(), 0)


def test_bad_records_and_the_run_goes_on(settings, write, read, tmp_path):
    bad = {
        "repetition_penalty must be a number, got 'x'": {"repetition_penalty": "x"},
        "banned_ids holds id 256, outside the vocabulary": {"banned_ids": [256]},
        "logit_bias holds id 300, outside": {"logit_bias": {"300": 1}},
        "forced_ids holds id 999, outside": {"forced_ids": {"0": 999}},
        "forced_ids has output position 24, beyond": {"forced_ids": {"24": 1}},
        "min_new_tokens=9 is more than max_new_tokens=4": {
            "min_new_tokens": 9,
            "max_new_tokens": 4,
        },
        "settings: regex: the pattern '[ab' is not a regular": {"regex": "[ab"},
        "regex a{2000} needs a table of 2002 states": {"regex": "a{2000}"},
        "'minimum' is not supported of type ['string']": {
            "json_schema": {"type": "string", "minimum": 3}
        },
        "exclude one another": {"json_schema": SCHEMA, "regex": "a"},
        "presence_penalty=1e+60 is not of a size": {"presence_penalty": 1e60},
        "leave no token": {"regex": DIGITS, "banned_ids": [*range(16, 26)]},
    }
    lines = [{"prompt": "a", **own} for own in bad.values()]
    prompts = write(*lines, {"prompt": "a", "json_schema": SCHEMA}, ALL)
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 1
    results = {r["line"]: r for r in read(out)}
    for line, message in enumerate(bad, start=1):
        assert message in results[line]["error"]
    assert "error" not in results[len(lines) + 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "[ab"}, "flags: regex: the pattern '[ab' is not a regular"),
        ({"json_schema": '{"type": "what"}'}, "flags: json_schema: JSON schema at #"),
        ({"banned_ids": (256,)}, "flags: banned_ids holds id 256, outside"),
        ({"top_logprobs": 257}, "--top_logprobs=257 is more than the 256 ids"),
    ],
)
def test_bad_flags_are_refused(settings, write, tmp_path, capsys, given, message):
    settings = dataclasses.replace(settings, **given)
    out = tmp_path / "out.jsonl"
    assert _run(settings, write({"prompt": "a"}), out) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
    if "top_logprobs" not in given:
        with pytest.raises(UsageError, match=re.escape(message)):
            run_prompt(settings, "a", out=io.StringIO(), notes=io.StringIO())


def test_equal_constraints_are_one_mask(tiny, monkeypatch):
    n_built = []
    build = TokenMask.from_regex
    monkeypatch.setattr(
        TokenMask, "from_regex", lambda *a, **k: n_built.append(a) or build(*a, **k)
    )
    constraints = Constraints(tiny, ignore_eos=False)
    mask = lambda **own: constraints.controls({"max_new_tokens": 9, **own}).token_mask
    assert mask() is None
    assert mask(regex="ab") is mask(regex="ab", seed=1)
    assert mask(regex="ab") is not mask(regex="ac")
    assert mask(json_schema=SCHEMA) is mask(json_schema=json.loads(json.dumps(SCHEMA)))
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}
    assert mask(json_schema=SCHEMA) is not mask(json_schema=turned)
    for _ in range(2):
        with pytest.raises(ValueError, match="not a regular expression"):
            mask(regex="(")
    assert len(n_built) == 3
    assert len(constraints.masks) == 4
    assert constraints.n_states == sum(m.n_states for m in constraints.masks)


def test_a_constraint_that_does_not_fit(settings, write, read, tmp_path, monkeypatch):
    # 64 states of 256 ids.
    monkeypatch.setattr(constraints_module, "_TABLE_BYTES", 4 * 64 * 256)
    patterns = ["a{40}", "b{40}", "c{4}", "a{40}"]
    lines = [{"prompt": "x", "regex": pattern} for pattern in patterns]
    prompts = write(*lines, ALL)
    settings = dataclasses.replace(settings, max_new_tokens=4)
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 1
    results = {r["line"]: r for r in read(out)}
    error = results[2]["error"]
    assert "regex b{40} has 42 states, and with the 42 of the 1 constraints" in error
    assert "more than the" in error and "use fewer different constraints" in error
    assert [results[line]["turns"][0]["text"] for line in (1, 3, 4)] == [
        "aaaa",
        "cccc",
        "aaaa",
    ]
    # The same are served after a cut.
    out.write_bytes(b"".join(out.read_bytes().splitlines(True)[:2]))
    assert _run(settings, prompts, out) == 1
    assert {r["line"]: r for r in read(out)} == results


def test_constraints_without_end_ids(tiny):
    endless = Constraints(tiny, ignore_eos=True)
    controls = endless.controls({"max_new_tokens": 9, "regex": "[ab]*"})
    assert controls.token_mask.n_states == 1
    with pytest.raises(ValueError, match="--ignore_eos leaves no end ids"):
        endless.controls({"max_new_tokens": 9, "regex": "ab"})


@pytest.fixture
def sampling(settings):
    """Three samples a record, and alternatives."""
    return dataclasses.replace(settings, n_samples=3, top_logprobs=2)


def test_samples_and_alternatives(sampling, write, read, tmp_path):
    settings = dataclasses.replace(sampling, seed=2**32 - 1)
    prompts = write({"prompt": "one"}, {"prompt": "two", "seed": 4}, {"prompt": " "})
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 1
    results = {r["line"]: r for r in read(out)}
    expected = generate(
        load(settings.model),
        ["one", "two"],
        batch_size=2,
        gamma=3,
        max_new_tokens=24,
        exact=True,
        temperature=0.9,
        seed=[2**32 - 1, 4],
        n=3,
        top_logprobs=2,
    )
    assert list(results[1]) == ["id", "line", "samples", "stats"]
    assert [s["seed"] for s in results[1]["samples"]] == [2**32 - 1, 0, 1]
    assert [s["seed"] for s in results[2]["samples"]] == [4, 5, 6]
    turns = [s["turns"] for line in (1, 2) for s in results[line]["samples"]]
    for (turn,), completion in zip(turns, expected, strict=True):
        assert turn["ids"] == list(completion.ids)
        best = [
            [[i, pytest.approx(x)] for i, x in at] for at in completion.top_logprobs
        ]
        assert turn["top_logprobs"] == best
        assert len(best) == turn["n_tokens"] and len(best[0]) == 2
        assert "logprobs" not in turn
    total = sum(turn["n_tokens"] for (turn,) in turns[:3])
    assert results[1]["stats"]["committed"] == total
    assert list(results[3]) == ["id", "line", "error"]


def test_samples_of_conversations(sampling, chat_model, write, read, tmp_path):
    three = dataclasses.replace(sampling, model=str(chat_model), max_new_tokens=8)
    alone = dataclasses.replace(three, n_samples=1)
    talk = {"turns": ["first", "second"]}
    prompts = write(*({**talk, "seed": seed} for seed in range(3)), name="alone.jsonl")
    assert _run(alone, prompts, tmp_path / "alone_out.jsonl") == 0
    expected = {r["line"]: r["turns"] for r in read(tmp_path / "alone_out.jsonl")}
    out = tmp_path / "out.jsonl"
    assert _run(three, write(talk, {"prompt": "x"}), out) == 0
    (result,) = [r for r in read(out) if r["line"] == 1]
    for j, sample in enumerate(result["samples"]):
        assert sample == {"seed": j, "turns": expected[j + 1]}


def test_a_failed_sample_keeps_the_others(sampling, write, read, tmp_path, monkeypatch):
    submit = Engine.submit

    def refuse(engine, request):
        if request.id == (1, 1):
            raise ValueError("does not fit")
        submit(engine, request)

    monkeypatch.setattr(Engine, "submit", refuse)
    out = tmp_path / "out.jsonl"
    assert _run(sampling, write({"prompt": "x"}, {"prompt": "y"}), out) == 1
    results = {r["line"]: r for r in read(out)}
    assert results[1]["error"] == "sample 1: does not fit"
    assert [len(s["turns"]) for s in results[1]["samples"]] == [1, 0, 1]
    assert [len(s["turns"]) for s in results[2]["samples"]] == [1, 1, 1]


def test_resume_with_controls(settings, write, read, tmp_path, capsys):
    settings = dataclasses.replace(settings, json_schema=SCHEMA, logit_bias={24: 1.0})
    lines = [{"prompt": f"{i}", "banned_ids": [100 + i]} for i in range(4)]
    prompts = write(*lines, {"prompt": "x", "regex": DIGITS}, ALL)
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 0
    assert "2 constraints of" in capsys.readouterr().err
    whole = sorted(read(out), key=lambda r: r["line"])
    out.write_bytes(out.read_bytes()[:-300])
    assert _run(settings, prompts, out) == 0
    assert sorted(read(out), key=lambda r: r["line"]) == whole
    other = dataclasses.replace(
        settings, json_schema=None, regex="a", banned_ids=(3,), logit_bias={24: 2.0}
    )
    assert _run(other, prompts, out) == 2
    said = capsys.readouterr().err
    assert 'logit_bias was {"24": 1.0} and is {"24": 2.0}' in said
    assert "banned_ids was [] and is [3]" in said
    assert 'regex was null and is "a"' in said


def test_one_prompt_streams_under_controls(settings):
    out, notes = io.StringIO(), io.StringIO()
    settings = dataclasses.replace(settings, regex=DIGITS, banned_ids=(24, 25))
    assert run_prompt(settings, "hello", out=out, notes=notes)
    assert re.fullmatch("[0-79]{2,5}'?\n", out.getvalue())
