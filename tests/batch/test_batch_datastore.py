"""Runs that draft from a datastore."""

import dataclasses

import pytest

from specjax.batch import (
    BatchSettings,
    Files,
    UsageError,
    main,
    run_prompt,
    write_datastore,
)

TEXTS = ["abc abd", "x", "0 1 2"]


@pytest.fixture
def settings(plain_model):
    return BatchSettings(
        model=str(plain_model),
        dtype="float32",
        gamma=3,
        max_new_tokens=24,
        temperature=0.8,
        exact=True,
        batch_size=2,
    )


def test_a_run_is_drafted_from_its_own_outputs(settings, write, read, tmp_path, capsys):
    prompts = write(*({"id": t, "prompt": t} for t in TEXTS))
    store = tmp_path / "store.npz"

    def run(name, **changes):
        out = tmp_path / f"{name}.jsonl"
        files = Files(prompts=str(prompts), output=str(out))
        assert main(dataclasses.replace(settings, **changes), files) == 0
        results = {r["id"]: r for r in read(out)}
        return out, [results[t]["turns"] for t in TEXTS], results

    # The drafter that other tests have compiled.
    out, first, _ = run("first")
    write_datastore([out], store, model=settings.model)
    _, again, results = run("again", drafter="suffix", datastore=str(store))
    assert again == first
    for result in results.values():
        assert result["stats"]["passes"] < result["stats"]["committed"] / 1.8


def test_one_prompt_is_drafted_from_it_too(settings, tmp_path, monkeypatch):
    store, seen = tmp_path / "store.npz", []
    (tmp_path / "a.txt").write_text("abc")
    write_datastore([tmp_path / "a.txt"], store, model=settings.model, size=64)

    def stream(model, prompt, *, drafter, **options):
        seen.append((drafter.params.size, drafter.drafter.spec.name))
        raise ValueError("enough")

    monkeypatch.setattr("specjax.batch._single.stream", stream)
    known = dataclasses.replace(settings, drafter="suffix", datastore=str(store))
    with pytest.raises(UsageError, match="enough"):
        run_prompt(known, "a")
    assert seen == [(64, "suffix")]


def test_a_datastore_that_does_not_fit_is_refused(settings, write, tmp_path, capsys):
    bad = tmp_path / "bad.npz"
    bad.write_text("")
    out = tmp_path / "out.jsonl"
    settings = dataclasses.replace(settings, drafter="suffix", datastore=str(bad))
    files = Files(prompts=str(write({"prompt": "a"})), output=str(out))
    assert main(settings, files) == 2
    assert f"--datastore={bad}: {bad} cannot be read" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(UsageError, match="absent.npz: make one with"):
        run_prompt(dataclasses.replace(settings, datastore="absent.npz"), "a")
