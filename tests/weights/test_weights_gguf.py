"""GGUF: round trips, quantised types, damaged and foreign files."""

import dataclasses
import struct

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_gguf import TINY, random_params, stored_tensors, variant, write_gguf

from specjax.weights import load_gguf
from specjax.weights._gguf_file import read_gguf

Q = gguf.GGMLQuantizationType


def _equal(one, other):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            np.asarray(a, np.float32), np.asarray(b, np.float32)
        ),
        one,
        other,
    )


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        variant(tied_head=True, qkv_bias=True, out_bias=True, ff_bias=True),
        variant(family="qwen2", qkv_bias=True),
        variant(family="qwen3", qk_norm=True, tied_head=True, head_width=16),
    ],
    ids=["llama", "llama-biases", "qwen2", "qwen3"],
)
def test_round_trip(tmp_path, config):
    params = random_params(config)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, config, stored_tensors(config, params))
    model = load_gguf(path, with_tokenizer=False)
    expected = dataclasses.replace(config, kernel_layout=model.config.kernel_layout)
    assert model.config == expected
    assert model.name == "tiny" and model.tokenizer is None
    if model.config.kernel_layout == config.kernel_layout:
        _equal(model.params, params)
    tokens = jnp.arange(10, dtype=jnp.int32)[None] * 3
    cache = model.target.init_cache(1, 16)
    logits = model.target.forward(model.params, tokens, cache)[0]
    assert np.isfinite(logits).all()


def test_bfloat16_transposes_by_the_preferred_layout(tmp_path):
    params = random_params(TINY)
    write_gguf(tmp_path / "t.gguf", TINY, stored_tensors(TINY, params))
    model = load_gguf(tmp_path / "t.gguf", dtype="bfloat16", with_tokenizer=False)
    kernel = model.params["blocks"]["1"]["ff"]["up"]["kernel"]
    want = params["blocks"]["1"]["ff"]["up"]["kernel"].astype(jnp.bfloat16)
    if model.config.kernel_layout == "out_in":
        want = want.T
    assert kernel.dtype == jnp.bfloat16
    _equal(kernel, want)


def test_the_llama_permutation_matters(tmp_path):
    """A qwen2 file with llama's row order must not load equal."""
    config = variant(family="qwen2", qkv_bias=True)
    params = random_params(config)
    permuted = stored_tensors(dataclasses.replace(config, family="llama"), params)
    write_gguf(tmp_path / "t.gguf", config, permuted)
    loaded = load_gguf(tmp_path / "t.gguf", with_tokenizer=False).params
    one, other = (p["blocks"]["0"]["attention"]["q"]["bias"] for p in (loaded, params))
    assert np.abs(np.asarray(one) - np.asarray(other)).max() > 0.01


def _random_blocks(kind, shape, rng):
    """Random bytes whose half-precision scales are small and finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, size), np.uint8)
    scales = {Q.Q4_K: (0, 2), Q.Q6_K: (size - 2,)}[kind]
    for at in scales:
        scale = rng.uniform(0.001, 0.02, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", "F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q6_K".split())
def test_quantised_types_are_the_dequantisers(tmp_path, kind):
    kind = Q[kind]
    config = variant(width=256, ff_width=256, n_layers=1, vocab_size=16)
    rng = np.random.default_rng(int(kind))
    params = random_params(config)
    tensors = stored_tensors(config, params)
    raw = {}
    for name in ("blk.0.ffn_up.weight", "blk.0.attn_q.weight"):
        if kind in (Q.Q4_K, Q.Q6_K):
            data = _random_blocks(kind, tensors[name].shape, rng)
        else:
            data = gguf.quants.quantize(tensors[name], kind)
        raw[name] = (data, kind)
        tensors[name] = gguf.quants.dequantize(data, kind)
    write_gguf(tmp_path / "q.gguf", config, tensors, raw=raw)
    write_gguf(tmp_path / "f.gguf", config, tensors)
    quantised, plain = (
        load_gguf(tmp_path / f"{name}.gguf", with_tokenizer=False).params
        for name in "qf"
    )
    _equal(quantised, plain)
    up = np.asarray(quantised["blocks"]["0"]["ff"]["up"]["kernel"])
    _equal(up.T, tensors["blk.0.ffn_up.weight"])


def test_header_is_what_the_package_reads(tmp_path):
    path = tmp_path / "t.gguf"
    words = ["one", "zwei", "три", ""]
    fields = [
        ("add_token_list", words),
        ("add_token_scores", [0.5, -1.0, 2.0, 0.0]),
        ("add_token_types", [1, 2, 3, 4]),
        ("add_add_bos_token", True),
        ("add_array", "empty.list", []),
    ]
    write_gguf(path, TINY, stored_tensors(TINY, random_params(TINY)), fields=fields[:4])
    header, reader = read_gguf(path), gguf.GGUFReader(path)
    known = {k: f.contents() for k, f in reader.fields.items() if k[:5] != "GGUF."}
    assert header.fields == known
    assert header.fields["tokenizer.ggml.tokens"] == words
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        stored = header.tensors[tensor.name]
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))
        _equal(stored.rows(0, stored.shape[0]), np.asarray(tensor.data))


def test_rope_freqs_become_factors(tmp_path):
    tensors = stored_tensors(TINY, random_params(TINY))
    tensors["rope_freqs.weight"] = np.array([1, 2, 4, 8], np.float32)
    write_gguf(tmp_path / "t.gguf", TINY, tensors)
    rope = load_gguf(tmp_path / "t.gguf", with_tokenizer=False).config.rope
    assert (rope.kind, rope.factors) == ("factors", (1.0, 2.0, 4.0, 8.0))


def test_one_error_lists_every_wrong_tensor(tmp_path):
    tensors = stored_tensors(TINY, random_params(TINY))
    del tensors["blk.1.ffn_up.weight"], tensors["output_norm.weight"]
    tensors["blk.0.attn_k.weight"] = np.zeros((4, 32), np.float32)
    tensors["blk.0.extra.weight"] = np.zeros((3,), np.float32)
    tensors["blk.0.attn_norm.weight"] = np.zeros((32,), np.int8)
    write_gguf(tmp_path / "t.gguf", TINY, tensors)
    with pytest.raises(ValueError) as caught:
        load_gguf(tmp_path / "t.gguf", with_tokenizer=False)
    message = str(caught.value)
    for line in (
        "missing: blk.1.ffn_up.weight [64, 32]",
        "missing: output_norm.weight [32]",
        "wrong shape: blk.0.attn_k.weight is [4, 32], the configuration needs [16, 32]",
        "not part of the model: blk.0.extra.weight [3]",
        "type that cannot be read: blk.0.attn_norm.weight is I8",
    ):
        assert line in message


def test_damaged_files(tmp_path):
    path = tmp_path / "t.gguf"
    write_gguf(path, TINY, stored_tensors(TINY, random_params(TINY)))
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size, message in ((len(whole) - 200, "cut short"), (300, "cut short")):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=message):
            load_gguf(cut, with_tokenizer=False)
    cut.write_bytes(b"not a model")
    with pytest.raises(ValueError, match="no GGUF file"):
        load_gguf(cut)
    cut.write_bytes(b"")
    with pytest.raises(ValueError, match="no GGUF file"):
        load_gguf(cut)
    cut.write_bytes(whole[:4] + struct.pack("<I", 1) + whole[8:])
    with pytest.raises(ValueError, match="version 1"):
        load_gguf(cut)
    with pytest.raises(FileNotFoundError, match="nothing.gguf"):
        load_gguf(tmp_path / "nothing.gguf")


def test_split_files_are_refused(tmp_path):
    path = tmp_path / "t.gguf"
    fields = [("add_uint16", "split.count", 3)]
    write_gguf(path, TINY, stored_tensors(TINY, random_params(TINY)), fields=fields)
    with pytest.raises(ValueError, match="one of 3 parts.*merge"):
        load_gguf(path)


def test_a_file_without_tokenizer_says_so(tmp_path):
    path = tmp_path / "t.gguf"
    write_gguf(path, TINY, stored_tensors(TINY, random_params(TINY)))
    with pytest.raises(ValueError, match="tokenizer.ggml.model"):
        load_gguf(path)
