"""Orbax checkpoints: equal after a restore, other dtypes, refused paths."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from specjax.models import DecoderConfig, Quantization, RopeConfig, decoder_target
from specjax.text import Tokenizer
from specjax.weights import (
    config_from_json,
    config_to_json,
    load_hf,
    load_orbax,
    save_orbax,
)

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "models"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The untied Qwen3 with a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {f"w{i}": i for i in range(80)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    backend.save(str(folder / "tokenizer.json"))
    loaded = load_hf(GOLDEN / "qwen3", with_tokenizer=False)
    tokenizer = Tokenizer.from_directory(folder)
    return dataclasses.replace(loaded, tokenizer=tokenizer, eos_ids=(7, 2))


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """The model as a checkpoint."""
    path = tmp_path_factory.mktemp("orbax") / "checkpoint"
    save_orbax(path, model)
    return path


def _equal(one, other):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.asarray(a, np.float32), np.asarray(b, np.float32)
        ),
        one,
        other,
    )


def test_round_trip(model, saved):
    restored = load_orbax(saved)
    assert restored.config == model.config
    assert restored.target is model.target
    assert (restored.name, restored.eos_ids) == ("qwen3", (7, 2))
    assert restored.tokenizer == model.tokenizer
    assert jax.tree.map(lambda x: x.dtype, restored.params) == jax.tree.map(
        lambda x: x.dtype, model.params
    )
    _equal(restored.params, model.params)


def test_another_dtype_takes_its_own_layout(model, saved):
    restored = load_orbax(saved, dtype="bfloat16")
    direct = load_hf(GOLDEN / "qwen3", dtype="bfloat16", with_tokenizer=False)
    assert restored.config == direct.config
    assert restored.target is direct.target
    assert restored.params["embedding"].dtype == jnp.bfloat16
    _equal(restored.params, direct.params)


def test_back_from_the_other_layout(model, tmp_path):
    """A checkpoint stored [out, in] restores to this platform's float32 layout."""
    other = {"in_out": "out_in", "out_in": "in_out"}[model.config.kernel_layout]
    config = dataclasses.replace(model.config, kernel_layout=other)

    def turn(path, leaf):
        return leaf.T if path[-1].key == "kernel" else leaf

    params = jax.tree_util.tree_map_with_path(turn, model.params)
    turned = dataclasses.replace(
        model,
        config=config,
        target=decoder_target(config),
        params=params,
        tokenizer=None,
    )
    save_orbax(tmp_path / "turned", turned)
    restored = load_orbax(tmp_path / "turned")
    assert restored.config == model.config and restored.tokenizer is None
    _equal(restored.params, model.params)


def test_existing_and_missing_paths(model, saved, tmp_path):
    with pytest.raises(FileExistsError, match="never written over"):
        save_orbax(saved, model)
    with pytest.raises(FileNotFoundError, match="no directory"):
        load_orbax(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="did not finish"):
        load_orbax(tmp_path)


def test_a_manifest_that_does_not_fit(model, tmp_path):
    path = tmp_path / "checkpoint"
    save_orbax(path, dataclasses.replace(model, tokenizer=None))
    file = path / "specjax.json"
    manifest = json.loads(file.read_text())
    wrong = json.loads(file.read_text())
    wrong["config"].update(ff_width=41, qk_norm=False)
    file.write_text(json.dumps(wrong))
    with pytest.raises(ValueError) as caught:
        load_orbax(path)
    assert "wrong shape: blocks.0.ff.up.kernel is [32, 40]" in str(caught.value)
    assert "not part of the model: blocks.1.attention.q_norm" in str(caught.value)
    file.write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(ValueError, match="format 2; this version reads 1"):
        load_orbax(path)
    file.write_text(json.dumps({"format": 1, "name": "x"}))
    with pytest.raises(ValueError, match="lacks config, eos_ids, tokenizer"):
        load_orbax(path)


CONFIGS = {
    "plain": DecoderConfig(100, 32, 2, 4, 2, 8, 64),
    "everything": DecoderConfig(
        vocab_size=100,
        width=32,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_width=8,
        ff_width=64,
        norm_eps=1e-6,
        rope=RopeConfig(
            theta=5e5,
            kind="longrope",
            factor=4.0,
            original_context=64,
            attention_factor=1.25,
            short_factor=(1.0, 1.1, 1.2, 1.3),
            long_factor=(1.0, 2.0, 3.0, 4.0),
        ),
        max_context=256,
        tied_head=True,
        qkv_bias=True,
        out_bias=True,
        ff_bias=True,
        qk_norm=True,
        windows=(None, 7, None),
        dtype="bfloat16",
        kernel_layout="out_in",
        family="qwen3",
    ),
}


def test_config_json_is_golden():
    """Changing the saved form must be a decision: old checkpoints have to load."""
    dump = {name: config_to_json(config) for name, config in CONFIGS.items()}
    golden = json.loads((GOLDEN / "decoder_configs.json").read_text())
    assert json.loads(json.dumps(dump)) == golden
    for name, config in CONFIGS.items():
        assert config_from_json(golden[name]) == config


def test_config_json_of_a_quantised_decoder():
    plain = CONFIGS["plain"]
    config = dataclasses.replace(
        plain,
        quantization=Quantization(4, plain.width // 2),
        tied_head=False,
        kernel_layout="out_in",
    )
    values = json.loads(json.dumps(config_to_json(config)))
    assert config_from_json(values) == config


def test_config_json_of_other_versions():
    values = json.loads(json.dumps(config_to_json(CONFIGS["plain"])))
    del values["windows"], values["rope"]["truncate"]
    assert config_from_json(values) == CONFIGS["plain"]
    with pytest.raises(ValueError, match=r"unknown fields \['experts'\]"):
        config_from_json({**values, "experts": 8})
    del values["width"]
    with pytest.raises(ValueError, match=r"lacks \['width'\]"):
        config_from_json(values)
