"""Runs with caps on drafts, a draft model, and draft lengths by measured costs."""

import dataclasses

import pytest

from specjax.batch import BatchSettings, Files, UsageError, main, run_prompt
from specjax.decode import Engine

PROMPT = "abc abc abc"


@pytest.fixture
def settings(plain_model):
    return BatchSettings(
        model=str(plain_model),
        dtype="float32",
        gamma=3,
        max_new_tokens=24,
        ignore_eos=True,
        exact=True,
        batch_size=2,
    )


def _run(settings, prompts, output):
    return main(settings, Files(prompts=str(prompts), output=str(output)))


def _by_line(results):
    return sorted(results, key=lambda result: result["line"])


def test_records_cap_their_drafts(settings, write, read, tmp_path):
    own = [{}, {"max_drafts": 0}, {"max_drafts": 1}, {"max_drafts": None}]
    prompts = write(*({"prompt": PROMPT, **one} for one in own))
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 0
    results = _by_line(read(out))
    assert len({result["turns"][0]["text"] for result in results}) == 1
    liked, none, one, null = (result["stats"] for result in results)
    assert none["verified"] == 0
    assert none["passes"] == none["committed"] == 24
    assert liked["passes"] < one["passes"] < 24
    assert 0 < one["verified"] <= one["passes"]
    assert null == liked
    assert [result.get("settings", {}) for result in results] == own


@pytest.mark.slow
def test_a_run_without_drafts_makes_plain_passes(settings, write, read, tmp_path):
    capped = dataclasses.replace(settings, max_drafts=0, exact=False)
    own = [{}, {"max_drafts": 0}, {"max_drafts": None}]
    prompts = write(*({"prompt": PROMPT, **one} for one in own))
    out = tmp_path / "out.jsonl"
    # One after the other: a row beside one with drafts takes part in wide passes.
    assert _run(dataclasses.replace(capped, batch_size=1), prompts, out) == 0
    flag, none, null = (result["stats"] for result in _by_line(read(out)))
    assert flag == none
    assert none["passes"] == 24 and none["wide_passes"] == none["verified"] == 0
    assert null["wide_passes"] > 0 and null["verified"] > 0


def test_one_prompt_is_capped_too(settings, monkeypatch):
    seen = []

    def submit(engine, request):
        seen.append(request.max_drafts)
        raise ValueError("enough")

    monkeypatch.setattr(Engine, "submit", submit)
    for most in (None, 0):
        with pytest.raises(UsageError, match="enough"):
            run_prompt(dataclasses.replace(settings, max_drafts=most), PROMPT)
    assert seen == [None, 0]
