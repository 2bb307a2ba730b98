"""Loads GGUF files."""

import os
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from specjax.models import DecoderConfig, config_from_gguf
from specjax.sharding import DEFAULT_RULES, Rules
from specjax.text import Tokenizer
from specjax.weights._assemble import StoredTensor, assemble, check_tensors
from specjax.weights._gguf_file import read_gguf
from specjax.weights._model import Model, make_model, make_text_side

# Read for the configuration; they are no parameters.
_ROPE_TENSORS = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)


def load_gguf(
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    with_tokenizer: bool = True,
    name: str | None = None,
) -> Model:
    """Loads a model from a GGUF file of architecture llama, qwen2 or qwen3.

    Every tensor type that the ``gguf`` package dequantises is read. The quantised
    weights are expanded to ``dtype``; the law of the model is that of the expanded
    weights.

    Args:
      path: the file.
      dtype: of the parameters, ``float32`` or ``bfloat16``.
      mesh: devices to shard the parameters over, or None for the default device.
      rules: logical axis -> mesh axis; see ``sharding``.
      with_tokenizer: load the tokenizer and chat template too.
      name: the model's name; None takes the file's.

    Returns:
      The model.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged, its architecture or tokenizer is not
        supported, or its tensors are not those of its metadata; the message lists
        all of them.
    """
    path = Path(path)
    fields, tensors = read_gguf(path)
    config = _config(fields, tensors, dtype)
    origin = str(path)
    rope = _rope_tensors(tensors)
    check_tensors(
        config, tensors, "gguf", origin=origin, ignore=lambda name: name in rope
    )
    tokenizer = Tokenizer.from_gguf(fields) if with_tokenizer else None
    text = make_text_side(
        config, tokenizer, origin=origin, eos_ids=None if tokenizer else _eos(fields)
    )
    params = assemble(config, tensors, "gguf", origin=origin, mesh=mesh, rules=rules)
    return make_model(name or path.stem, config, params, text)


def gguf_config(path: Path, dtype: str) -> DecoderConfig:
    """Reads a GGUF file's configuration; raises as ``load_gguf`` does."""
    return _config(*read_gguf(path), dtype)


def _config(
    fields: dict[str, Any], tensors: dict[str, StoredTensor], dtype: str
) -> DecoderConfig:
    rope = {
        name: tensors[name].rows(0, tensors[name].shape[0]).tolist()
        for name in _rope_tensors(tensors)
    }
    return config_from_gguf(
        fields,
        {name: tensor.shape for name, tensor in tensors.items()},
        rope_tensors=rope,
        dtype=dtype,
    )


def _rope_tensors(tensors: dict[str, StoredTensor]) -> list[str]:
    return [n for n in _ROPE_TENSORS if n in tensors and tensors[n].readable]


def _eos(fields: dict) -> tuple[int, ...]:
    found = (fields.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot"))
    return tuple(dict.fromkeys(i for i in found if i is not None))
