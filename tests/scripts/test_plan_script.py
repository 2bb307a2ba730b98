"""scripts/plan.py as a user runs it."""

import json
import pathlib
import subprocess
import sys

import pytest

from specjax import theory

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "plan.py"


def _run(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_given_numbers_give_theorys_numbers_and_a_plot(tmp_path):
    a = (0.8, 0.7, 0.6, 0.6)
    done = _run(
        "--target=not/here",  # nothing is measured, so nothing is loaded
        "--gamma=2",
        "--acceptance=chat=0.3",
        f"--acceptance=code={','.join(map(str, a))}",
        "--cost_ratio=0.05",
        "--verify_cost=1.2",
        f"--output={tmp_path / 'plan.png'}",
        f"--json={tmp_path / 'plan.json'}",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    words = " ".join(done.stdout.split())
    record = json.loads((tmp_path / "plan.json").read_text())
    for one, given in zip(record["classes"], (0.3, a), strict=True):
        advice = theory.advise(given, 2, 0.05, 1.2, max_gamma=4)
        assert one["predicted"] == advice.speedup
        assert one["best"] == advice.best._asdict()
        curve = theory.speedup_curve(given, 0.05, 1.2, max_gamma=4)
        assert one["curve"] == list(curve)
        assert (
            f"{advice.speedup:.3f}" in words and f"{advice.best.speedup:.3f}" in words
        )
        assert all(line in words for line in advice.lines)


def test_a_wrong_flag_exits_2_with_the_reason():
    done = _run("--target=/no/such/model", "--hardware=abacus")
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("abacus", "measured", "tpu-v5e"))
    assert "Traceback" not in done.stderr and "/no/such/model" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--drafter=telepathy"], ("telepathy", "prompt_lookup")),
        (["--gamma=0"], ("gamma=0", ">= 1")),
        (["--acceptance=1.5"], ("1.5", "[0, 1]")),
        (["--acceptance=chat=much"], ("much", "0.7")),
        (["--prompts=/no/such.jsonl"], ("/no/such.jsonl", "built-in")),
        (["--output=/no/such/plan.png"], ("/no/such/plan.png", "no directory")),
        (["--json=/no/such/plan.json"], ("/no/such/plan.json", "no directory")),
        (["--batches=two"], ("two", "whole")),
        (["--target=/no/such/model"], ("/no/such/model",)),
        (["--hardware=tpu-v5e", "--acceptance=0.5", "--target=/no/it"], ("/no/it",)),
        (
            ["--hardware=tpu-v5e", "--acceptance=0.5", "--dtype=float32"],
            ("fp32", "tpu-v5e", "not known"),
        ),
    ],
)
def test_every_wrong_value_does(run_here, arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        run_here(*arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out and all(word in said.err for word in words)


def test_a_device_that_is_not_here(run_here, capsys):
    run_here("--hardware=h200-sxm", "--acceptance=chat=0.3")
    words = " ".join(capsys.readouterr().out.split())
    assert "h200-sxm (roofline), bfloat16" in words
    assert "Switch speculation off above batch" in words
