"""scripts/verify_equivalence.py as a user runs it."""

import json
import pathlib
import subprocess
import sys

import pytest

from specjax.testing import tiny_model
from specjax.weights import save_orbax

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "verify_equivalence.py"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    save_orbax(folder / "model", tiny_model())
    prompts = folder / "prompts.jsonl"
    lines = [{"id": f"p{i}", "prompt": "abc abd " * (i + 1)} for i in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [f"--model={folder / 'model'}", f"--prompts={prompts}"]


def _run(*arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_exact_mode_finds_no_difference_and_exits_0(arguments):
    done = _run(*arguments, "--temperatures=0,0.8", "--max_new_tokens=16")
    assert done.returncode == 0, done.stderr
    assert "6 comparisons, 0 differences" in done.stdout


def test_wrong_arguments_exit_2_with_the_reason(arguments):
    done = _run(*arguments, "--drafters=telepathy")
    assert done.returncode == 2
    assert "telepathy" in done.stderr and "prompt_lookup" in done.stderr
    done = _run("--prompts=/no/such/file.jsonl")
    assert done.returncode == 2 and "/no/such/file.jsonl" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_settings_change_nothing_either(arguments):
    settings = "--settings=penalties,bias,least"
    done = _run(*arguments, settings, "--temperatures=0.8", "--max_new_tokens=16")
    assert done.returncode == 0, done.stderr
    assert "3 comparisons, 0 differences" in done.stdout
    done = _run(*arguments, "--settings=telepathy")
    assert done.returncode == 2 and "known: penalties, bias, least" in done.stderr


@pytest.mark.slow
def test_row_invariance_script(arguments):
    script = SCRIPT.with_name("row_invariance.py")
    command = [sys.executable, str(script), *arguments, "--widths=3", "--limit=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout and "flips, 3 rows" in done.stdout
    done = subprocess.run([*command, "--widths=1"], capture_output=True, text=True)
    assert done.returncode == 2 and "width=1 must be at least 2" in done.stderr
