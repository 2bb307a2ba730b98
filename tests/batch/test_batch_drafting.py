"""Runs with caps on drafts, and with a draft model."""

import dataclasses
import os

import pytest

from specjax.batch import BatchSettings, Files, UsageError, main, run_prompt
from specjax.decode import Engine
from specjax.testing.tiny import tiny_model
from specjax.weights import save_orbax

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


def _prompts(write):
    return write(*({"prompt": f"{i} {PROMPT}", "seed": i} for i in range(4)))


def _texts(read, out):
    return [result["turns"][0]["text"] for result in _by_line(read(out))]


def test_a_draft_model_changes_the_passes_and_not_the_text(
    settings, plain_model, write, read, tmp_path, capsys
):
    prompts = _prompts(write)
    settings = dataclasses.replace(settings, temperature=0.9)
    plain, out = tmp_path / "plain.jsonl", tmp_path / "out.jsonl"
    assert _run(dataclasses.replace(settings, max_drafts=0), prompts, plain) == 0
    drafting = dataclasses.replace(
        settings, drafter="model", draft_model=str(plain_model)
    )
    assert _run(drafting, prompts, out) == 0
    assert _texts(read, out) == _texts(read, plain)
    # It is the target itself, and draws with the target's own noise.
    for result in read(out):
        assert result["stats"]["accepted"] >= 17
        assert result["stats"]["passes"] == 6
    capsys.readouterr()
    # The same by other words; then others.
    path = os.path.relpath(plain_model)
    same = dataclasses.replace(drafting, draft_model=path, draft_dtype="float32")
    assert _run(same, prompts, out) == 0
    other = dataclasses.replace(drafting, draft_dtype="bfloat16")
    assert _run(other, prompts, out) == 2
    assert 'draft_dtype was "float32" and is "bfloat16"' in capsys.readouterr().err
    other = dataclasses.replace(drafting, draft_model="other/draft")
    assert _run(other, prompts, out) == 2
    said = capsys.readouterr().err
    assert f'draft_model was "{plain_model}" and is "other/draft"' in said


def test_a_draft_model_of_other_tokens_is_refused(settings, write, tmp_path, capsys):
    folder, out = tmp_path / "small", tmp_path / "out.jsonl"
    save_orbax(folder, tiny_model(vocab_size=128))
    for path, message in (
        (folder, "cannot draft for .* Use a draft model of the same tokenizer"),
        (tmp_path / "none", "There is no file or directory"),
    ):
        drafting = dataclasses.replace(settings, drafter="model", draft_model=str(path))
        assert _run(drafting, write({"prompt": "a"}), out) == 2
        assert not out.exists()
        said = capsys.readouterr().err
        assert f"--draft_model={path}: " in said
        with pytest.raises(UsageError, match=message):
            run_prompt(drafting, "a")


def test_a_drafter_that_the_model_cannot_be_is_refused(
    settings, write, tmp_path, capsys
):
    deep = dataclasses.replace(settings, drafter="early_exit:9")
    assert _run(deep, write({"prompt": "a"}), tmp_path / "out.jsonl") == 2
    assert "--drafter=early_exit:9: exit_block=9 must be in" in capsys.readouterr().err
