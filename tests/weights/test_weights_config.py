"""A configuration is read without the weights, from wherever ``load`` finds them."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from specjax.testing import tiny_model
from specjax.weights import load_config, load_hf, save_orbax

GOLDEN = Path(__file__).parents[1] / "golden" / "models" / "smollm2"


def test_a_directory_and_its_config_alone_say_the_same(tmp_path):
    model = load_hf(GOLDEN, dtype="bfloat16", with_tokenizer=False)
    # Only where products are computed does it matter how kernels are stored.
    layout = model.config.kernel_layout
    for path in (GOLDEN, shutil.copy(GOLDEN / "config.json", tmp_path / "big.json")):
        config = load_config(path, dtype="bfloat16")
        assert dataclasses.replace(config, kernel_layout=layout) == model.config


def test_an_orbax_checkpoint_and_a_gguf_file_are_read(tmp_path):
    model = tiny_model()
    save_orbax(tmp_path / "model", model)
    config = load_config(tmp_path / "model")
    assert (config.width, config.n_layers) == (32, 2) and config.dtype == "float32"
    known = load_config("smollm2-135m-instruct", dtype="bfloat16")
    assert (known.width, known.n_layers, known.dtype) == (576, 30, "bfloat16")


def test_of_the_hub_only_the_config_is_fetched(tmp_path, monkeypatch):
    asked = {}

    def snapshot(repo_id, **how):
        asked.update(how, repo_id=repo_id)
        shutil.copy(GOLDEN / "config.json", tmp_path / "config.json")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    config = load_config("org/name")
    assert (
        config.width == json.loads((GOLDEN / "config.json").read_text())["hidden_size"]
    )
    assert asked["repo_id"] == "org/name" and asked["allow_patterns"] == ["config.json"]


def test_what_is_not_there_is_said_as_load_says_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or directory"):
        load_config(tmp_path / "none")
    with pytest.raises(ValueError, match="smollm2-135m-instruct"):
        load_config("gpt")
    with pytest.raises(ValueError, match="neither config.json"):
        load_config(tmp_path)
