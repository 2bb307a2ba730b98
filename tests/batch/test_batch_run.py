"""Runs in this process: records, order, bad records, conversations, resume."""

import dataclasses
import io
import json
import os
import signal

import pytest

from specjax import generate, load
from specjax.batch import (
    BatchSettings,
    Files,
    OutputFile,
    UsageError,
    main,
    run_file,
    run_prompt,
)
from specjax.batch._progress import Progress
from specjax.decode import Engine

TEXTS = [f"{i}: {'abc ' * (1 + i % 5)}" for i in range(9)]


@pytest.fixture
def settings(plain_model):
    return BatchSettings(
        model=str(plain_model),
        dtype="float32",
        gamma=3,
        max_new_tokens=24,
        exact=True,
        batch_size=2,
    )


def _generate(settings, prompts, **options):
    # The same number of slots, and so the same compiled programs.
    options = {"gamma": 3, "max_new_tokens": 24, "exact": True, **options}
    return generate(load(settings.model), prompts, batch_size=2, **options)


@pytest.fixture
def chat_settings(settings, chat_model):
    return dataclasses.replace(settings, model=str(chat_model))


def _run(settings, prompts, output):
    return main(settings, Files(prompts=str(prompts), output=str(output)))


def test_one_record_each_as_generate_gives_it(settings, write, read, tmp_path, capsys):
    prompts = write(*({"id": f"q{i}", "prompt": t} for i, t in enumerate(TEXTS)))
    out = tmp_path / "out.jsonl"
    settings = dataclasses.replace(settings, logprobs=True, temperature=0.7)
    assert _run(settings, prompts, out) == 0
    results = {r["id"]: r for r in read(out)}
    assert len(results) == len(read(out)) == len(TEXTS)
    expected = _generate(settings, TEXTS, temperature=0.7)
    for i, completion in enumerate(expected):
        result = results[f"q{i}"]
        assert result["line"] == i + 1
        assert "settings" not in result
        (turn,) = result["turns"]
        assert turn["text"] == completion.text
        assert turn["ids"] == list(completion.ids)
        assert turn["n_tokens"] == len(turn["ids"]) == len(turn["logprobs"])
        assert turn["logprobs"] == pytest.approx(completion.logprobs, abs=1e-4)
        assert turn["n_prompt_tokens"] == len(TEXTS[i])
        assert turn["finish_reason"] == completion.finish_reason
        assert result["stats"]["committed"] == turn["n_tokens"]
    said = capsys.readouterr()
    assert said.out == ""
    assert "9 of 9 records" in said.err
    assert "tokens/pass" in said.err


def test_order_of_completion(settings, write, read, tmp_path):
    lengths = [120, 2, 2, 2, 2, 2]
    settings = dataclasses.replace(settings, ignore_eos=True)
    prompts = write(*({"prompt": "a", "max_new_tokens": n} for n in lengths))
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 0
    assert [r["line"] for r in read(out)] == [2, 3, 4, 5, 6, 1]
    assert [r["turns"][0]["n_tokens"] for r in read(out)] == [2, 2, 2, 2, 2, 120]


def test_own_settings_win_over_flags(settings, write, read, tmp_path):
    own = {"temperature": 1.5, "seed": 3, "max_new_tokens": 5, "top_k": 9}
    prompts = write({"id": "a", "prompt": "x", **own}, {"id": "b", "prompt": "x"})
    out = tmp_path / "out.jsonl"
    settings = dataclasses.replace(settings, ignore_eos=True, ids=False)
    assert _run(settings, prompts, out) == 0
    results = {r["id"]: r for r in read(out)}
    assert results["a"]["settings"] == own
    assert results["a"]["turns"][0]["n_tokens"] == 5
    assert results["b"]["turns"][0]["n_tokens"] == 24
    assert "ids" not in results["b"]["turns"][0]


def test_requests_are_submitted_as_slots_come_free(settings, write, tmp_path):
    most = []
    step = Engine.step

    def counted(engine):
        most.append(engine.n_running + engine.n_waiting)
        return step(engine)

    prompts = write(*({"prompt": "ab", "max_new_tokens": 2} for _ in range(40)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", counted)
        run_file(settings, prompts, tmp_path / "out.jsonl")
    assert max(most) == 4


def test_bad_records_and_the_run_goes_on(settings, write, read, tmp_path, capsys):
    prompts = write(
        b"{not json",
        b'{"id": "latin", "prompt": "\xe9"}',
        {"id": "none"},
        {"id": "blank", "prompt": " "},
        {"id": "long", "prompt": "x" * 600},
        {"id": "many", "prompt": "x", "max_new_tokens": 5000},
        {"id": "hot", "prompt": "x", "temperature": 1e-60},
        {"id": "k", "prompt": "x", "top_k": 2**40},
        {"id": "chat", "turns": ["one", "two"]},
        {"id": "good", "prompt": "x"},
        {"id": "good", "prompt": "y"},
    )
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 1
    results = read(out)
    errors = {r["line"]: r["error"] for r in results if "error" in r}
    assert sorted(r["line"] for r in results) == list(range(1, 12))
    for line, message in {
        1: "not JSON",
        2: "not UTF-8: byte 0xe9",
        3: "has no 'prompt'",
        4: "blank",
        5: "needs 628 cache slots (prompt 600 + max_new_tokens 24 + a pass of 4)",
        6: "shorten the prompt or ask for fewer tokens",
        7: "temperature=1e-60 must be 0 or in",
        8: "top_k=1099511627776 must be a whole number in",
        9: "has 2 turns, which needs a chat template",
        11: "'good' was already used in line 10",
    }.items():
        assert message in errors[line]
    assert 10 not in errors
    # Error records count as done, and in the exit status.
    assert _run(settings, prompts, out) == 1
    assert read(out) == results
    assert "11 of 11 records" in capsys.readouterr().err


def test_a_temperature_that_the_rule_refuses(settings, write, read, tmp_path):
    settings = dataclasses.replace(settings, rule="greedy")
    out = tmp_path / "out.jsonl"
    assert _run(settings, write({"prompt": "x", "temperature": 1.0}), out) == 1
    assert "decodes at temperature 0" in read(out)[0]["error"]


def test_given_capacity(settings, write, read, tmp_path, capsys):
    prompts = write({"prompt": "x" * 100})
    settings = dataclasses.replace(settings, capacity=64)
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 1
    error = read(out)[0]["error"]
    assert "needs 128 cache slots" in error
    assert "a row holds 64" in error
    assert "raise --capacity (up to 512)" in error
    too_much = dataclasses.replace(settings, capacity=513)
    assert _run(too_much, prompts, tmp_path / "other.jsonl") == 2
    assert "more than the 512 positions" in capsys.readouterr().err
    assert not (tmp_path / "other.jsonl").exists()


def test_conversations_go_on_from_the_answers(chat_settings, write, read, tmp_path):
    turns = ["first", "second", "third"]
    prompts = write(
        {"id": "talk", "turns": turns, "temperature": 1.0},
        *({"prompt": text} for text in TEXTS),
    )
    out = tmp_path / "out.jsonl"
    assert _run(chat_settings, prompts, out) == 0
    (result,) = [r for r in read(out) if r["id"] == "talk"]
    messages = []
    for turn, answer in zip(turns, result["turns"], strict=True):
        messages.append({"role": "user", "content": turn})
        (expected,) = _generate(chat_settings, [messages], temperature=1.0)
        assert answer["text"] == expected.text
        assert answer["n_prompt_tokens"] == len(expected.prompt_ids)
        messages.append({"role": "assistant", "content": answer["text"]})
    n_tokens = sum(turn["n_tokens"] for turn in result["turns"])
    assert result["stats"]["committed"] == n_tokens


def test_conversations_need_room_for_every_turn(chat_settings, write, read, tmp_path):
    prompts = write({"turns": ["one", "two", "three"], "max_new_tokens": 180})
    out = tmp_path / "out.jsonl"
    assert _run(chat_settings, prompts, out) == 1
    (result,) = read(out)
    assert "3 turns of max_new_tokens 180" in result["error"]
    nochat = dataclasses.replace(chat_settings, chat=False)
    assert _run(nochat, prompts, tmp_path / "other.jsonl") == 1
    assert "--nochat was given" in read(tmp_path / "other.jsonl")[0]["error"]


def test_a_failed_turn_keeps_the_answers_before(
    chat_settings, write, read, tmp_path, monkeypatch
):
    check, n_checked = Engine.check, []

    def refuse_third(engine, request):
        n_checked.append(request)
        if len(n_checked) == 3:
            raise ValueError("does not fit")
        check(engine, request)

    monkeypatch.setattr(Engine, "check", refuse_third)
    prompts = write({"id": "talk", "turns": ["one", "two", "three"]})
    out = tmp_path / "out.jsonl"
    assert _run(chat_settings, prompts, out) == 1
    (result,) = read(out)
    assert result["error"] == "turn 3: does not fit"
    assert len(result["turns"]) == 2


def test_batch_size_may_change_between_runs(settings, write, read, tmp_path):
    prompts = write(*({"prompt": text} for text in TEXTS))
    settings = dataclasses.replace(settings, temperature=0.8)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert _run(settings, prompts, whole) == 0
    assert _run(settings, prompts, parts) == 0
    some = parts.read_bytes().splitlines(True)[:4]
    parts.write_bytes(b"".join(some) + b'{"id": "ha')
    again = dataclasses.replace(settings, batch_size=3)
    assert _run(again, prompts, parts) == 0
    by_line = lambda results: sorted(results, key=lambda r: r["line"])
    assert by_line(read(parts)) == by_line(read(whole))
    assert parts.read_bytes().startswith(b"".join(some))


def test_other_flags_are_refused(settings, write, tmp_path, capsys):
    prompts = write({"prompt": "a"}, {"prompt": "b"})
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 0
    before = out.read_bytes()
    other = dataclasses.replace(settings, temperature=0.5, stop=("x",))
    assert _run(other, prompts, out) == 2
    said = capsys.readouterr().err
    assert 'temperature was 0.0 and is 0.5; stop was [] and is ["x"]' in said
    assert out.read_bytes() == before


@pytest.mark.parametrize("where", [(Engine, "step"), (OutputFile, "append")])
def test_a_signal_leaves_whole_lines(
    settings, write, read, tmp_path, capsys, monkeypatch, where
):
    owner, name = where
    inner, calls = getattr(owner, name), []

    def signalled(*args):
        calls.append(args)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return inner(*args)

    prompts = write(*({"prompt": text} for text in TEXTS))
    out = tmp_path / "out.jsonl"
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, signalled)
        assert _run(settings, prompts, out) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped by SIGINT. " in capsys.readouterr().err
    if owner is OutputFile:
        assert len(read(out)) == 3  # the line that it came in was finished
    assert _run(settings, prompts, out) == 0
    assert sorted(r["line"] for r in read(out)) == list(range(1, len(TEXTS) + 1))


def test_says_what_it_repairs_and_resumes(settings, write, tmp_path, capsys):
    prompts = write({"prompt": "a"}, {"prompt": "b"})
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 0
    out.write_bytes(out.read_bytes()[:-5])
    capsys.readouterr()
    assert _run(settings, prompts, out) == 0
    said = capsys.readouterr().err
    assert "bytes of a half-written record" in said
    assert "going on: 1 of 2 records are done" in said


def test_a_finished_run_does_not_load_the_model(settings, write, tmp_path, monkeypatch):
    prompts = write({"prompt": "a"})
    out = tmp_path / "out.jsonl"
    assert _run(settings, prompts, out) == 0
    monkeypatch.setattr("specjax.batch._run.load_model", None)
    assert _run(settings, prompts, out) == 0


def test_refused_before_the_model_is_loaded(settings, write, tmp_path, monkeypatch):
    monkeypatch.setattr("specjax.batch._run.load_model", None)
    prompts = write({"prompt": "a"})
    out = tmp_path / "out.jsonl"
    with pytest.raises(UsageError, match="there is no such file"):
        run_file(settings, tmp_path / "none.jsonl", out)
    with pytest.raises(UsageError, match="no regular file"):
        run_file(settings, tmp_path, out)
    with pytest.raises(UsageError, match="is the prompt file itself"):
        run_file(settings, prompts, prompts)
    with pytest.raises(UsageError, match="there is no directory"):
        run_file(settings, prompts, tmp_path / "none" / "out.jsonl")
    with pytest.raises(UsageError, match="holds no records"):
        run_file(settings, write(name="empty.jsonl"), out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.jsonl", "in.jsonl"]


def test_changed_prompts_are_refused(settings, write, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert _run(settings, write({"prompt": "a"}), out) == 0
    assert _run(settings, write({"prompt": "b"}), out) == 2
    assert "prompt file is not the one" in capsys.readouterr().err


def test_models_that_do_not_go_with_the_settings(settings, write, tmp_path, capsys):
    prompts, out = write({"prompt": "a"}), tmp_path / "out.jsonl"
    unknown = dataclasses.replace(settings, model="smollm")
    assert _run(unknown, prompts, out) == 2
    assert "smollm2-135m-instruct" in capsys.readouterr().err
    assert _run(dataclasses.replace(settings, chat=True), prompts, out) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert not out.exists()


def test_one_prompt_streams(settings):
    class Pieces(io.StringIO):
        n_flushed = 0

        def flush(self):
            self.n_flushed += 1

    out, notes = Pieces(), io.StringIO()
    settings = dataclasses.replace(settings, max_new_tokens=100, ignore_eos=True)
    assert run_prompt(settings, "hello", out=out, notes=notes)
    (expected,) = _generate(settings, "hello", max_new_tokens=100, ignore_eos=True)
    assert out.getvalue() == expected.text + "\n"
    assert out.n_flushed > 3
    (line,) = notes.getvalue().splitlines()
    assert line.startswith("100 tokens in ")
    for part in ("tokens/s", "tokens/pass", "first text after"):
        assert part in line
    with pytest.raises(UsageError, match="--prompt: .*cache slots"):
        run_prompt(settings, "x" * 1000, out=out, notes=notes)


def test_progress_in_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Progress(10, 3, 1, stream) as progress:
        progress.record(failed=True)
        progress.committed(5)
    assert "4/10 done" in stream.getvalue()
    assert "2 errors" in stream.getvalue()


def test_results_are_plain_json(settings, write, tmp_path):
    out = tmp_path / "out.jsonl"
    prompts = write({"prompt": "a", "meta": {"x": 1}, "stop": ["b"]})
    assert _run(settings, prompts, out) == 0
    refuse = lambda name: pytest.fail(name)
    (line,) = out.read_text().splitlines()
    result = json.loads(line, parse_constant=refuse)
    assert list(result) == ["id", "line", "turns", "stats", "settings"]
    assert result["id"] == "line-1"
    assert result["settings"] == {"stop": ["b"]}
