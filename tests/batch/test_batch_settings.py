"""Settings, flags and configuration files."""

import importlib.util
import sys
from pathlib import Path

import pytest
from absl import flags

from specjax.batch import (
    BatchSettings,
    Files,
    UsageError,
    define_flags,
    parse_flags,
    read_flags,
)
from specjax.batch._settings import SAMPLING

# ml_collections loads config files by a way that Python is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

CONFIG = Path(__file__).parents[2] / "configs" / "generate.py"


def _flags(args):
    values = flags.FlagValues()
    define_flags(values)
    argv = ["generate.py", *args]
    return argv, values


def _read(*args):
    argv, values = _flags(args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)  # where --config.key is looked for
        values(argv)
    return read_flags(values)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafter": "nope"}, "known drafters: plain, prompt_lookup"),
        ({"rule": "nope"}, "known rules: coupled, greedy, rejection"),
        ({"dtype": "int4"}, "known: float32, bfloat16"),
        ({"gamma": 0}, "gamma"),
        ({"gamma": 2.0}, "gamma must be a whole number"),
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
        ({"capacity": -1}, "capacity must be a whole number >= 1"),
        ({"temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": 1e-60}, "temperature=1e-60 must be 0 or in"),
        ({"temperature": 1e-5}, "temperature=1e-05 must be 0 or in"),
        ({"temperature": 1e60}, r"temperature=1e\+60 must be 0 or in"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_k": 2**40}, "top_k=1099511627776 must be a whole number in"),
        ({"seed": 2**32}, "seed must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"stop": ("",)}, "stop must hold non-empty strings"),
        ({"stop": "x"}, "stop must be a list"),
        ({"exact": 1}, "exact must be true or false"),
        ({"chat": "yes"}, "chat must be true or false"),
        ({"rule": "greedy", "temperature": 0.5}, "decodes at temperature 0"),
    ],
)
def test_refused(given, message):
    with pytest.raises(UsageError, match=message):
        BatchSettings(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of .* got neither"),
        ({"prompt": "a", "prompts": "b"}, "exactly one of .* got both"),
        ({"prompts": "b"}, "needs --output"),
        ({"prompt": "a", "output": "b"}, "--output goes with --prompts"),
        ({"prompt": " "}, "--prompt is blank"),
        ({"prompt": 3}, "--prompt must be a string"),
    ],
)
def test_files_refused(given, message):
    with pytest.raises(UsageError, match=message):
        Files(**given)


def test_flags_default_to_the_settings():
    settings, files = _read("--prompt=hi")
    assert settings == BatchSettings()
    assert files == Files(prompt="hi")


def test_every_flag_arrives():
    settings, files = _read(
        *("--prompts=a", "--output=b", "--model=m", "--drafter=plain", "--gamma=3"),
        *("--rule=rejection", "--temperature=0.5", "--top_k=4", "--top_p=0.9"),
        *("--min_p=0.1", "--seed=5", "--max_new_tokens=7", "--stop=x", "--stop=y,z"),
        *("--batch_size=2", "--dtype=float32", "--capacity=99", "--exact", "--nochat"),
        *("--ignore_eos", "--noids", "--logprobs"),
    )
    assert files == Files(prompts="a", output="b")
    assert settings == BatchSettings(
        model="m",
        drafter="plain",
        gamma=3,
        rule="rejection",
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        seed=5,
        max_new_tokens=7,
        stop=("x", "y,z"),
        batch_size=2,
        dtype="float32",
        capacity=99,
        exact=True,
        chat=False,
        ignore_eos=True,
        ids=False,
        logprobs=True,
    )


def test_config_file_in_the_repository_holds_the_defaults():
    settings, _ = _read(f"--config={CONFIG}", "--prompt=hi")
    assert settings == BatchSettings()
    spec = importlib.util.spec_from_file_location("generate_config", CONFIG)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {*vars(BatchSettings()), *vars(Files(prompt="hi"))}
    assert set(module.get_config()) == names


def test_flags_win_over_config(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n"
        "  return ConfigDict({'gamma': 3, 'seed': 5, 'top_k': 7, 'stop': ('a',),\n"
        "                     'prompts': 'p', 'output': 'o'})\n"
    )
    settings, files = _read(f"--config={path}", "--config.top_k=8", "--gamma=6")
    assert (settings.gamma, settings.seed, settings.top_k) == (6, 5, 8)
    assert settings.stop == ("a",)
    assert files == Files(prompts="p", output="o")
    with pytest.raises(UsageError, match="exactly one"):
        _read(f"--config={path}", "--prompt=hi")


def test_unknown_config_keys_are_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n  return ConfigDict({'gama': 3})\n"
    )
    with pytest.raises(UsageError, match=r"unknown key 'gama'; known keys: .*gamma"):
        _read(f"--config={path}", "--prompt=hi")


def test_fingerprint_is_json_and_leaves_out_the_batch_size():
    fingerprint = BatchSettings(stop=("a",)).fingerprint()
    assert fingerprint["stop"] == ["a"]
    assert "batch_size" not in fingerprint
    assert set(SAMPLING) < set(fingerprint)
    assert BatchSettings(batch_size=9).fingerprint() == BatchSettings().fingerprint()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gama=3", "--prompt=hi"], "gama"),
        (["--gamma=three", "--prompt=hi"], "--gamma=three"),
        (["--gamma=0", "--prompt=hi"], "gamma"),
        (["hello"], "'hello' is no flag"),
        (["--prompts=in.jsonl"], "needs --output"),
        (["--prompt=hi", "--config=none.py"], "none.py"),
        (["--prompt=hi", f"--config={CONFIG}", "--config.gama=3"], "gama"),
        (["--prompt=hi", "--drafter=eagle"], "known drafters"),
    ],
)
def test_wrong_flags_exit_with_status_2(args, message, capsys, monkeypatch):
    argv, values = _flags(args)
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as caught:
        parse_flags(argv, values)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
