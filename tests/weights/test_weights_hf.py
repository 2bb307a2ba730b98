"""Hugging Face directories: dtypes, shards, tied heads, tokenizers, errors."""

import json
import pathlib
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from specjax.weights import load_hf

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "models"


@pytest.fixture
def folder(tmp_path):
    """A copy of the tied Llama, to be changed."""
    return pathlib.Path(shutil.copytree(GOLDEN / "llama_tied", tmp_path / "model"))


def _tensors(folder):
    return load_file(folder / "model.safetensors")


def _rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def _edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _tokenizer(folder, n_tokens):
    vocab = {f"w{i}": i for i in range(n_tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))


def _load(folder, **options):
    return load_hf(folder, with_tokenizer=False, **options)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stored_dtype(folder, stored, dtype):
    tensors = {name: value.astype(stored) for name, value in _tensors(folder).items()}
    _rewrite(folder, tensors)
    model = _load(folder, dtype=dtype)
    up = model.params["blocks"]["1"]["ff"]["up"]["kernel"]
    want = tensors["model.layers.1.mlp.up_proj.weight"].astype(jnp.dtype(dtype))
    if model.config.kernel_layout == "in_out":
        want = want.T
    assert up.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(up, np.float32), want.astype(np.float32))


def test_shards(folder):
    whole = _load(folder)
    tensors = _tensors(folder)
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[:7], names[7:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    np.testing.assert_array_equal(
        _load(folder).params["embedding"], whole.params["embedding"]
    )
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 2 shards.*model-00002-of-00002"):
        _load(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        _load(folder)


def test_a_stored_head_must_be_the_tied_embedding(folder):
    tensors = _tensors(folder)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    _rewrite(folder, tensors)
    assert "head" not in _load(folder).params
    tensors["lm_head.weight"][5, 3] += 1
    _rewrite(folder, tensors)
    with pytest.raises(ValueError, match="lm_head.weight is stored and differs"):
        _load(folder)


def test_one_error_lists_every_wrong_tensor(folder):
    tensors = _tensors(folder)
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((3, 32), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros((32,), np.float32)
    tensors["model.layers.0.input_layernorm.weight"] = np.zeros((32,), np.int8)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    _rewrite(folder, tensors)
    with pytest.raises(ValueError) as caught:
        _load(folder)
    message = str(caught.value)
    for line in (
        "missing: model.norm.weight [32]",
        "missing: model.layers.0.mlp.up_proj.weight [40, 32]",
        "wrong shape: model.layers.1.self_attn.k_proj.weight is [3, 32]",
        "not part of the model: model.layers.0.self_attn.q_proj.bias [32]",
        "type that cannot be read: model.layers.0.input_layernorm.weight is I8",
    ):
        assert line in message
    assert "inv_freq" not in message


def test_frequency_buffers_are_harmless(folder):
    tensors = _tensors(folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    _rewrite(folder, tensors)
    _load(folder)


def test_missing_and_damaged_files(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no directory"):
        _load(tmp_path / "nowhere")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"version https://git-lfs"):
        weights.write_bytes(data)
        with pytest.raises(ValueError, match="no whole safetensors file"):
            _load(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        _load(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="convert them"):
        _load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        _load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no config.json"):
        _load(folder)


def test_tokenizer_and_end_ids(folder):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        load_hf(folder)
    _tokenizer(folder, 90)  # the embedding has 89 rows
    with pytest.raises(ValueError, match="90 ids and the embedding 89 rows"):
        load_hf(folder)
    _tokenizer(folder, 80)
    model = load_hf(folder)
    assert model.tokenizer.vocab_size == 80
    assert model.eos_ids == (2,) and model.chat_template is None
    assert model.name == "model" and len(repr(model)) < 300
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert load_hf(folder).eos_ids == (5, 2) == _load(folder).eos_ids
    _edit(folder, eos_token_id=89)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=r"\[89\] are outside"):
        _load(folder)
    _edit(folder, eos_token_id="end")
    with pytest.raises(ValueError, match="must be token ids"):
        _load(folder)


def test_a_malformed_chat_template_fails_before_tensors_are_read(folder):
    _tokenizer(folder, 80)
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="template"):
        load_hf(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert load_hf(folder).chat_template is not None
