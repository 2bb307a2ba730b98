"""``scripts/generate.py`` as a process: kills, signals, exit statuses, streams."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specjax.testing.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "models" / "smollm2"
SCRIPT = ROOT / "scripts" / "generate.py"
N_RECORDS = 40


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A golden checkpoint, which loads faster than Orbax, with a tokenizer."""
    path = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(GOLDEN, path)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = 512
    (path / "config.json").write_text(json.dumps(config))
    tiny_tokenizer(config["vocab_size"]).save(path)
    return path


@pytest.fixture(scope="module")
def flags(model, tmp_path_factory):
    prompts = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    with prompts.open("w") as file:
        for i in range(N_RECORDS):
            record = {"id": f"q{i}", "prompt": f"{i} a b a b"}
            if i % 4 == 0:
                record["regex"] = "[a-z ]*"
            # Long enough that a kill finds the run at work.
            file.write(json.dumps({**record, "max_new_tokens": 100 + i}) + "\n")
    return [
        f"--model={model}",
        f"--prompts={prompts}",
        "--dtype=float32",
        "--temperature=0.9",
        "--exact",
        "--ignore_eos",
        "--frequency_penalty=0.2",
        "--banned_ids=3",
        "--batch_size=2",
        "--gamma=2",
    ]


def _command(args):
    return [sys.executable, str(SCRIPT), *map(str, args)]


def _run(environment, *args):
    return subprocess.run(
        _command(args), env=environment, capture_output=True, timeout=120, cwd=ROOT
    )


def _interrupt(environment, args, output, signum):
    """Starts a run and sends a signal once it has written some records."""
    before = output.read_bytes().count(b"\n") if output.exists() else 0
    process = subprocess.Popen(
        _command(args), env=environment, stderr=subprocess.PIPE, cwd=ROOT
    )
    try:
        deadline = time.monotonic() + 60
        while not output.exists() or output.read_bytes().count(b"\n") < before + 3:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signum)
        return process.wait(60), process.stderr.read().decode()
    finally:
        process.kill()
        process.communicate()


def _results(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def unkilled(environment, flags, tmp_path_factory):
    output = tmp_path_factory.mktemp("unkilled") / "out.jsonl"
    done = _run(environment, *flags, f"--output={output}")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""
    assert f"{N_RECORDS} of {N_RECORDS} records".encode() in done.stderr
    results = sorted(_results(output), key=lambda r: r["line"])
    for result in results[::4]:
        assert re.fullmatch("[a-z ]*", result["turns"][0]["text"])
    return results


@pytest.mark.slow
def test_killed_three_times(environment, flags, unkilled, tmp_path):
    output = tmp_path / "out.jsonl"
    args = [*flags, f"--output={output}"]
    for cut in (0, 1, 40):
        status, _ = _interrupt(environment, args, output, signal.SIGKILL)
        assert status == -signal.SIGKILL
        written = output.read_bytes()
        assert written.count(b"\n") < N_RECORDS
        # As if the kill had come within a write.
        output.write_bytes(written[: len(written) - cut])
    done = _run(environment, *args)
    assert done.returncode == 0, done.stderr.decode()
    assert b"cut" in done.stderr
    assert sorted(_results(output), key=lambda r: r["line"]) == unkilled


def test_a_signal_ends_a_run_cleanly(environment, flags, unkilled, tmp_path):
    output = tmp_path / "out.jsonl"
    args = [*flags, f"--output={output}"]
    status, said = _interrupt(environment, args, output, signal.SIGTERM)
    assert status == 143
    assert "stopped by SIGTERM" in said
    assert "run the same command again" in said
    assert "Traceback" not in said
    assert output.read_bytes().endswith(b"\n")
    by_line = {r["line"]: r for r in unkilled}
    assert all(r == by_line[r["line"]] for r in _results(output))


def test_wrong_flags(environment):
    done = _run(environment, "--prompt=hi", "--gama=3")
    assert done.returncode == 2
    assert "gama" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
    assert done.stdout == b""


def test_one_prompt_with_the_embedded_model(environment):
    config = ["--config=configs/generate.py", "--config.dtype=float32"]
    prompt = ["--prompt=What is 2+2?", "--max_new_tokens=8", "--drafter=plain"]
    done = _run(environment, *config, *prompt)
    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.decode().strip()) > 3
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("8 tokens in")
    assert "first text after" in line
