"""Runs with caps on drafts, a draft model, and draft lengths by measured costs."""

import dataclasses
import json
import os

import pytest

from specjax import bench
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


@pytest.fixture
def engines(monkeypatch):
    """What engines were made with."""
    made, init = [], Engine.__init__

    def noted(engine, model, **options):
        made.append(options)
        init(engine, model, **options)

    monkeypatch.setattr(Engine, "__init__", noted)
    return made


@pytest.fixture
def timed(monkeypatch):
    """Stands in for the clock; notes what it was asked."""
    asked = []

    def measure(model, draft, **options):
        asked.append({"drafter": draft.drafter.spec.name, **options})
        # Others each time, as a clock would have it; drafts are dear enough to be cut.
        draft_cost = 0.9 + 0.1 * len(asked)
        return bench.Costs(draft_cost, (1.0, 1.2, 1.3, 1.4), {}, 0.01)

    monkeypatch.setattr(bench, "measure_costs", measure)
    return asked


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


@pytest.mark.parametrize("rule", ["coupled", "traversal"])
def test_a_draft_model_drafts_trees(
    rule, settings, plain_model, write, read, tmp_path, capsys
):
    prompts, plain, out = _prompts(write), tmp_path / "plain.jsonl", tmp_path / "out"
    settings = dataclasses.replace(settings, rule=rule, exact=False)
    assert _run(dataclasses.replace(settings, max_drafts=0), prompts, plain) == 0
    drafting = dataclasses.replace(
        settings, drafter="model:5", draft_model=str(plain_model)
    )
    assert _run(drafting, prompts, out) == 0
    assert _texts(read, out) == _texts(read, plain)
    assert all(r["stats"]["passes"] <= 8 for r in read(out))
    capsys.readouterr()
    for wrong, said in [
        ({"exact": True}, "exact=True needs a drafter of chains"),
        ({"adaptive": True, "costs": "c.json"}, "drafts trees"),
        ({"rule": "block"}, "'block' verifies chains"),
    ]:
        other = dataclasses.replace(drafting, **wrong)
        assert _run(other, prompts, tmp_path / "other") == 2
        assert said in capsys.readouterr().err


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


def test_adaptive_runs_cut_drafts_and_not_the_text(
    settings, write, read, tmp_path, timed, engines
):
    prompts, costs = _prompts(write), tmp_path / "costs.json"
    fixed, out = tmp_path / "fixed.jsonl", tmp_path / "out.jsonl"
    assert _run(settings, prompts, fixed) == 0
    adaptive = dataclasses.replace(settings, adaptive=True, costs=str(costs))
    assert _run(adaptive, prompts, out) == 0
    assert _texts(read, out) == _texts(read, fixed)
    verified = lambda path: sum(r["stats"]["verified"] for r in read(path))
    assert verified(out) < verified(fixed)
    (asked,) = timed
    assert asked == {
        "drafter": "prompt_lookup",
        "max_gamma": 3,
        "n_context": 120,
        "batch": 2,
        "batches": (2,),
    }
    # Exact: every pass is four rows wide.
    expected = [1.4, 1.4 + 2.0, 1.4 + 3.0]
    assert engines[-1]["drafter"].params["cost"].tolist() == pytest.approx(expected)
    content = json.loads(costs.read_text())
    assert content["measured_for"]["batch_size"] == 2
    assert content["measured_with"]["n_context"] == 120


def test_costs_are_read_where_they_are_there(
    settings, write, tmp_path, timed, engines, capsys, monkeypatch
):
    stop = lambda engine: pytest.fail("a pass was made")
    monkeypatch.setattr(Engine, "step", stop)
    prompts, out = _prompts(write), tmp_path / "out.jsonl"
    costs = tmp_path / "costs.json"
    adaptive = dataclasses.replace(
        settings, adaptive=True, costs=str(costs), exact=False
    )

    def start(**changes):
        with pytest.raises(pytest.fail.Exception):
            _run(dataclasses.replace(adaptive, **changes), prompts, out)
        return engines[-1]["drafter"].params["cost"].tolist()

    first = start()
    assert first == pytest.approx([1.0, 1.3 + 2.0, 1.4 + 3.0])
    assert start() == first and len(timed) == 1
    # Without a file, or with another, they are measured anew.
    assert start(costs=None) != first and len(timed) == 2
    assert start(costs=str(tmp_path / "b.json"), batch_size=3) != first
    assert timed[-1]["batch"] == 3 and len(timed) == 3
    for change, message in (
        ({"batch_size": 3}, "batch_size was 2 and is 3"),
        ({"dtype": "bfloat16"}, 'dtype was "float32" and is "bfloat16"'),
        ({"drafter": "suffix"}, 'drafter was "prompt_lookup" and is "suffix"'),
        ({"model": "other/model"}, 'and is "other/model"'),
    ):
        capsys.readouterr()
        assert _run(dataclasses.replace(adaptive, **change), prompts, out) == 2
        said = capsys.readouterr().err
        assert f"--costs={costs}: " in said and message in said
    assert len(timed) == 3 and not out.exists()


def test_two_draft_models_have_costs_of_their_own(settings, tmp_path, timed, engines):
    costs = tmp_path / "costs.json"
    drafting = dataclasses.replace(
        settings,
        drafter="model",
        draft_model=settings.model,
        adaptive=True,
        costs=str(costs),
        capacity=64,
    )
    with pytest.raises(UsageError, match="cache slots"):
        run_prompt(drafting, "a" * 99)
    (asked,) = timed
    assert (asked["batch"], asked["n_context"]) == (1, 32)
    assert engines[-1]["drafter"].drafter.spec.name == "adaptive(model)"
    other = dataclasses.replace(drafting, draft_dtype="bfloat16")
    with pytest.raises(UsageError, match=r'float32\)" and is "model\(.*bfloat16\)"'):
        run_prompt(other, "a")


def test_runs_go_on_with_other_costs_where_ids_do_not_depend_on_them(
    settings, write, read, tmp_path, timed, capsys
):
    prompts, out = _prompts(write), tmp_path / "out.jsonl"
    adaptive = dataclasses.replace(settings, adaptive=True)
    assert _run(adaptive, prompts, out) == 0
    whole = _texts(read, out)
    out.write_bytes(b"".join(out.read_bytes().splitlines(True)[:2]))
    kept = dataclasses.replace(adaptive, costs=str(tmp_path / "costs.json"))
    assert _run(kept, prompts, out) == 0
    assert _texts(read, out) == whole and len(timed) == 2
    runs = json.loads((tmp_path / "out.jsonl.meta.json").read_text())["runs"]
    assert [run["costs"]["draft"] for run in runs] == [1.0, 1.1]
    assert runs[0]["costs"]["verify"] == [1.0, 1.2, 1.3, 1.4]
    # Whether it is adaptive is a setting as others are.
    capsys.readouterr()
    assert _run(settings, prompts, out) == 2
    assert "adaptive was true and is false" in capsys.readouterr().err


def test_runs_need_the_same_costs_where_ids_depend_on_them(
    settings, write, read, tmp_path, timed, capsys
):
    prompts, out = _prompts(write), tmp_path / "out.jsonl"
    costs = tmp_path / "costs.json"
    drawing = dataclasses.replace(
        settings, rule="rejection", temperature=0.9, adaptive=True, costs=str(costs)
    )
    assert _run(drawing, prompts, out) == 0
    whole, size = _texts(read, out), out.stat().st_size
    half = b"".join(out.read_bytes().splitlines(True)[:2])
    out.write_bytes(half)
    assert _run(drawing, prompts, out) == 0
    assert _texts(read, out) == whole and out.stat().st_size == size
    # The file is lost, and others are measured.
    out.write_bytes(half)
    costs.unlink()
    capsys.readouterr()
    assert _run(drawing, prompts, out) == 2
    assert "was begun with other costs of passes" in capsys.readouterr().err
    assert out.read_bytes() == half


@pytest.mark.slow
def test_costs_are_measured(settings, write, tmp_path, capsys):
    costs = tmp_path / "costs.json"
    adaptive = dataclasses.replace(
        settings, adaptive=True, costs=str(costs), exact=False
    )
    assert _run(adaptive, _prompts(write), tmp_path / "out.jsonl") == 0
    said = capsys.readouterr().err
    assert "timing passes of 2 x 1 to 4 rows after 120 tokens" in said
    assert f"written to {costs}" in said
    content = json.loads(costs.read_text())
    assert content["v_plain_passes"][0] == 1.0 and len(content["v_plain_passes"]) == 4
    assert 0 < content["c_plain_passes"] < 1 and 0 < content["plain_pass_s"] < 1
