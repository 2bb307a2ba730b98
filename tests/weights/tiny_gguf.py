"""Writes tiny decoders as GGUF files, in the row order of llama.cpp's converter."""

import dataclasses

import gguf
import jax
import numpy as np

from specjax.models import DecoderConfig, init_params
from specjax.weights import checkpoint_name
from specjax.weights._assemble import flat_params

TINY = DecoderConfig(
    vocab_size=48,
    width=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_width=8,
    ff_width=64,
    norm_eps=1e-5,
    max_context=128,
    kernel_layout="in_out",
    family="llama",
)


def random_params(config, seed=0):
    """Parameters whose norms and biases are random as well."""
    rng = np.random.default_rng(seed)
    params = init_params(config, seed)
    return jax.tree.map(
        lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype), params
    )


def permute(rows, heads):
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def stored_tensors(config, params):
    """GGUF name -> float32 array as llama.cpp's converter would write it."""
    tensors = {}
    for path, leaf in flat_params(params).items():
        value = np.asarray(leaf, np.float32)
        if path.endswith(".kernel") and config.kernel_layout == "in_out":
            value = value.T
        if config.family == "llama":
            if ".attention.q." in path:
                value = permute(value, config.n_heads)
            elif ".attention.k." in path:
                value = permute(value, config.n_kv_heads)
        tensors[checkpoint_name(path, "gguf")] = np.ascontiguousarray(value)
    return tensors


def write_gguf(path, config, tensors, *, raw=None, fields=()):
    """Writes a file.

    Args:
      path: the file.
      config: the decoder.
      tensors: name -> float32 array.
      raw: name -> (bytes as a uint8 array [rows, bytes], type) that replace some.
      fields: (method of GGUFWriter, *arguments) to call as well.
    """
    raw = raw or {}
    writer = gguf.GGUFWriter(str(path), config.family)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ff_width)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    for method, *arguments in fields:
        getattr(writer, method)(*arguments)
    for name, value in tensors.items():
        if name in raw:
            data, kind = raw[name]
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def variant(**changes):
    """The tiny configuration with some fields changed."""
    return dataclasses.replace(TINY, **changes)
