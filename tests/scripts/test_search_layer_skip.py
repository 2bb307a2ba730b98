"""scripts/search_layer_skip.py as a user runs it."""

import json
import pathlib
import subprocess
import sys

import pytest

from specjax import drafters
from specjax.testing import tiny_model

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "search_layer_skip.py"


def test_a_wrong_flag_exits_2_with_the_reason():
    command = [sys.executable, str(SCRIPT), "--costs=guessed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and not done.stdout
    assert all(word in done.stderr for word in ("guessed", "measured or bytes"))
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--per_class=1"], ("per_class=1", "half of them held out")),
        (["--max_new_tokens=0"], ("max_new_tokens=0", "[1,")),
        (["--max_gamma=0"], ("max_gamma=0", "[1,")),
        (["--evaluations=59"], ("evaluations=59", "30 blocks", "60 sublayers")),
        (["--seed=-1"], ("seed=-1", "[0,")),
        (["--rounds=0"], ("rounds=0", "repetitions")),
        (["--n_context=0"], ("n_context=0", "cached tokens")),
        (["--n_context=9000"], ("n_context=9000", "8192", "lower n_context")),
        (["--temperature=-0.5"], ("temperature=-0.5", ">= 0")),
        (["--temperature=nan"], ("temperature=nan", "finite")),
        (["--verify_cost=cheap"], ("cheap", "0.7")),
        (["--verify_cost=1,1.2"], ("2 entries", "4 tokens need 5")),
        (["--verify_cost=0"], ("verify_cost", "> 0")),
        (["--dtype=int3"], ("int3", "bfloat16")),
        (["--prompts=/no/such.jsonl"], ("/no/such.jsonl", "built-in")),
        (["--output=/no/such/skip.json"], ("/no/such/skip.json", "no directory")),
        (["--target=/no/such/model"], ("/no/such/model",)),
    ],
)
def test_every_wrong_value_does(run_here, arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        run_here(*arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out and all(word in said.err for word in words), said.err
    assert "writing" not in said.err  # nothing was computed


def test_prompts_that_cannot_be_read_or_halved_do_too(run_here, capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    for content, words in (
        ('{"prompt": 3}\n', ("line 1", "prompt must be a string")),
        ('{"prompt": "a"}\n', ("no class of two prompts",)),
    ):
        path.write_text(content)
        with pytest.raises(SystemExit) as ended:
            run_here(f"--prompts={path}")
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert all(word in said for word in words) and "writing" not in said


def test_it_prints_what_it_writes(run_here, capsys, tmp_path, monkeypatch):
    model = tiny_model(3)
    make = "specjax.bench._skip_make"
    monkeypatch.setattr(f"{make}.load", lambda name, dtype: model)
    monkeypatch.setattr(f"{make}.load_config", lambda name, dtype: model.config)
    path = tmp_path / "skip.json"
    run_here(
        "--per_class=2",
        "--max_new_tokens=6",
        "--n_context=9",
        "--costs=bytes",
        "--verify_cost=1.5",
        "--evaluations=11",
        f"--output={path}",
    )
    said = capsys.readouterr()
    assert "search_layer_skip: searching" in said.err
    words = " ".join(said.out.split())
    found = json.loads(path.read_text())
    assert found["n_evaluations"] == 11 and found["settings"]["verify_cost"] == 1.5
    assert found["pays"] is False
    assert found["remarks"][0].startswith("Nothing that was tried beats plain decoding")
    assert all(" ".join(line.split()) in words for line in found["remarks"])
    for row in found["rows"]:
        assert f"{row['acceptance']:.3f}" in words and f"{row['speedup']:.3f}" in words
    assert all(name in words for name in ("quoting", "chat", "code"))
    call = words[words.index("drafters.layer_skip(") :]
    made = eval(call, {"drafters": drafters, "model": model})
    again = drafters.layer_skip(model, found["gamma"], **found["skip"])
    assert made.drafter is again.drafter
