"""Settings, flags and configuration files."""

import importlib.util
import json
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
        ({"drafter": "nope"}, "known drafters: lookahead, plain, prompt"),
        ({"datastore": "a.npz"}, "goes with drafter 'suffix'; .* 'prompt_lookup'"),
        ({"drafter": "suffix", "datastore": ""}, "datastore must be a path, got ''"),
        ({"drafter": "model"}, "needs draft_model, .* drafters.from_model"),
        ({"draft_model": "m"}, "goes with drafter 'model'; .* 'prompt_lookup'"),
        ({"drafter": "model", "draft_model": ""}, "draft_model must be a path, got ''"),
        ({"drafter": "model", "draft_model": "m", "gamma": 0}, "gamma=0"),
        ({"draft_dtype": "float32"}, "draft_dtype='float32' is .*: give draft_model"),
        (
            {"drafter": "model", "draft_model": "m", "draft_dtype": "int4"},
            "draft_dtype 'int4' is not known; known: float32, bfloat16",
        ),
        ({"adaptive": 1}, "adaptive must be true or false"),
        (
            {"adaptive": True, "drafter": "plain"},
            "'plain' drafts nothing: give another",
        ),
        ({"costs": "c.json"}, "costs='c.json' are those .*: give adaptive, or leave"),
        ({"adaptive": True, "costs": 3}, "costs must be a path, got 3"),
        ({"adaptive": True, "rule": "rejection"}, "give costs, a file .* 'coupled'"),
        ({"adaptive": True, "rule": "typical"}, "give costs, a file .* 'coupled'"),
        ({"rule": "nope"}, "known rules: .*coupled, greedy"),
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
        ({"max_drafts": -1}, "max_drafts must be at least 0 and at most .*, got -1"),
        ({"max_drafts": True}, "max_drafts must be an integer, got True"),
        ({"stop": ("",)}, "stop must hold non-empty strings"),
        ({"stop": "x"}, "stop must be a list"),
        ({"exact": 1}, "exact must be true or false"),
        ({"chat": "yes"}, "chat must be true or false"),
        ({"rule": "greedy", "temperature": 0.5}, "decodes at temperature 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": 1e-60}, "1e-60 is not of a size that float32 holds"),
        ({"presence_penalty": -1e60}, "-1e.60 is not of a size that float32 holds"),
        ({"logit_bias": {3: 1e60}}, r"logit_bias\[3\]=1e.60 is not of a size"),
        ({"logit_bias": "{3: 1}"}, "logit_bias '{3: 1}' is not JSON"),
        ({"logit_bias": "[]"}, "logit_bias must be an object"),
        ({"logit_bias": '{"3": -Infinity}'}, "put it into banned_ids"),
        ({"banned_ids": (-1,)}, "banned_ids must be at least 0"),
        ({"min_new_tokens": 200}, "min_new_tokens=200 is more than max_new_tokens=128"),
        ({"regex": ""}, "regex must be a non-empty string"),
        ({"json_schema": "{"}, "json_schema '{' is not JSON"),
        ({"json_schema": "3"}, "json_schema must be an object, got 3"),
        ({"regex": "a", "json_schema": "{}"}, "exclude one another"),
        ({"top_logprobs": -1}, "top_logprobs must be a whole number >= 0"),
        ({"n_samples": 0}, "n_samples must be a whole number >= 1"),
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
        *("--ignore_eos", "--noids", "--logprobs", "--top_logprobs=2"),
        *("--repetition_penalty=1.5", "--presence_penalty=-1", "--n_samples=4"),
        *("--frequency_penalty=0.5", '--logit_bias={"3": -1}', "--banned_ids=4"),
        *("--banned_ids=5", "--min_new_tokens=6", "--regex=a{1,2}", "--max_drafts=0"),
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
        top_logprobs=2,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        n_samples=4,
        frequency_penalty=0.5,
        logit_bias={3: -1.0},
        banned_ids=(4, 5),
        min_new_tokens=6,
        regex="a{1,2}",
        max_drafts=0,
    )


def test_the_datastore_arrives():
    settings, _ = _read("--prompt=hi", "--drafter=suffix", "--datastore=s.npz")
    assert settings == BatchSettings(drafter="suffix", datastore="s.npz")


def test_what_drafts_go_by_arrives():
    settings, _ = _read(
        *("--prompt=hi", "--drafter=model", "--draft_model=small", "--adaptive"),
        *("--draft_dtype=float32", "--costs=c.json", "--rule=rejection"),
    )
    assert settings == BatchSettings(
        drafter="model",
        draft_model="small",
        draft_dtype="float32",
        adaptive=True,
        costs="c.json",
        rule="rejection",
    )
    assert _read("--prompt=hi", "--adaptive", "--rule=greedy")[0].costs is None


def test_json_flags_may_name_a_file(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "null"}\n')
    settings, _ = _read("--prompt=hi", f"--json_schema=@{path}")
    assert settings == BatchSettings(json_schema={"type": "null"})
    with pytest.raises(UsageError, match="--json_schema=@none cannot be read"):
        _read("--prompt=hi", "--json_schema=@none")


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
    kept = BatchSettings(adaptive=True, costs="c.json").fingerprint()
    assert kept == BatchSettings(adaptive=True).fingerprint()
    assert kept != BatchSettings().fingerprint()
    draft = BatchSettings(drafter="model", draft_model="m", dtype="float32")
    assert draft.fingerprint()["draft_dtype"] == "float32"
    many = BatchSettings(
        stop=("a",),
        banned_ids=(1,),
        logit_bias={2: 1.0},
        json_schema={"properties": {"b": {}, "a": {}}},
    ).fingerprint()
    assert json.loads(json.dumps(many)) == many
    # The order of the properties is that of the output.
    other = BatchSettings(json_schema='{"properties": {"a": {}, "b": {}}}')
    assert other.fingerprint()["json_schema"] != many["json_schema"]


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
        (["--prompt=hi", "--json_schema={"], "json_schema '{' is not JSON"),
        (["--prompt=hi", "--banned_ids=x"], "banned_ids"),
        (["--prompt=hi", "--forced_ids=1"], "forced_ids"),
        (["--prompt=hi", "--max_drafts=-1"], "max_drafts must be at least 0"),
        (["--prompt=hi", "--drafter=model"], "needs draft_model"),
        (["--prompt=hi", "--draft_model=m"], "goes with drafter 'model'"),
        (["--prompt=hi", "--costs=c.json"], "give adaptive"),
    ],
)
def test_wrong_flags_exit_with_status_2(args, message, capsys, monkeypatch):
    argv, values = _flags(args)
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as caught:
        parse_flags(argv, values)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
