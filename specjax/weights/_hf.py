"""Loads Hugging Face directories: config.json, safetensors, tokenizer.json."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from jax.sharding import Mesh

from specjax.models import DecoderConfig, config_from_hf
from specjax.sharding import DEFAULT_RULES, Rules
from specjax.text import Tokenizer
from specjax.weights._assemble import StoredTensor, assemble, check_tensors
from specjax.weights._model import Model, make_model, make_text_side

_READABLE = ("F32", "F16", "BF16")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_hf(
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
    with_tokenizer: bool = True,
    name: str | None = None,
) -> Model:
    """Loads a model from a Hugging Face directory.

    Needed are ``config.json``, ``model.safetensors`` or its index and shards, and
    ``tokenizer.json``. Tensors are float32, float16 or bfloat16.

    Args:
      path: the directory.
      dtype: of the parameters, ``float32`` or ``bfloat16``.
      mesh: devices to shard the parameters over, or None for the default device.
      rules: logical axis -> mesh axis; see ``sharding``.
      with_tokenizer: load the tokenizer and chat template too.
      name: the model's name; None takes the directory's.

    Returns:
      The model.

    Raises:
      FileNotFoundError: the directory or a file in it is missing.
      ValueError: a file is malformed, the architecture is not supported, or the
        tensors are not those of the configuration; the message lists all of them.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"There is no directory {path}.")
    values = read_json(path / "config.json")
    config = config_from_hf(values, dtype=dtype)
    tensors = _tensors(path)
    origin = str(path)
    check_tensors(config, tensors, "hf", origin=origin, ignore=_is_buffer)
    tokenizer = Tokenizer.from_directory(path) if with_tokenizer else None
    eos_ids = _eos(path, values)
    if tokenizer is not None and tokenizer.eos_ids:
        eos_ids = tokenizer.eos_ids  # which read generation_config.json too
    text = make_text_side(config, tokenizer, origin=origin, eos_ids=eos_ids)
    params = assemble(config, tensors, "hf", origin=origin, mesh=mesh, rules=rules)
    return make_model(name or path.resolve().name, config, params, text)


def hf_config(path: Path, dtype: str) -> DecoderConfig:
    """Reads a config.json, or that of a directory; raises as ``load_hf`` does."""
    file = path / "config.json" if path.is_dir() else path
    return config_from_hf(read_json(file), dtype=dtype)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
      path: the file.

    Returns:
      The object.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path.name} in {path.parent}.")
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def _is_buffer(name: str) -> bool:
    """Frequencies that old versions of transformers saved; they are computed."""
    return name.endswith("rotary_emb.inv_freq")


def _eos(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    file = path / "generation_config.json"
    ids = read_json(file).get("eos_token_id") if file.is_file() else None
    ids = config.get("eos_token_id") if ids is None else ids
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{path}: eos_token_id={ids} must be token ids.")
    return tuple(dict.fromkeys(ids))


def _tensors(path: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in _shards(path):
        try:
            # An empty file, a cut download and a Git LFS pointer all end up here.
            with safetensors.safe_open(file, framework="numpy") as handle:
                for name in handle.keys():
                    if name in tensors:
                        raise ValueError(f"{file}: {name} is in another shard too.")
                    part = handle.get_slice(name)
                    shape, kind = tuple(part.get_shape()), part.get_dtype()
                    tensors[name] = StoredTensor(
                        shape, kind, kind in _READABLE, _reader(file, name)
                    )
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{file} ({file.stat().st_size} bytes) is no whole safetensors file: "
                f"{error}. Download it again."
            ) from error
    return tensors


def _shards(path: Path) -> list[Path]:
    single, index = path / _SINGLE, path / _INDEX
    if index.is_file():
        # transformers prefers the single file; two answers are one too many.
        if single.is_file():
            raise ValueError(f"{path} has both {_SINGLE} and {_INDEX}; remove one.")
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{index} has no weight_map.")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{path} lacks {len(missing)} of {len(names)} shards that {_INDEX} "
                f"names: {', '.join(missing)}."
            )
        return [path / name for name in names]
    if single.is_file():
        return [single]
    hint = ""
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        hint = " PyTorch files are there; convert them to safetensors first."
    raise FileNotFoundError(f"{path} has neither {_SINGLE} nor {_INDEX}.{hint}")


def _reader(file: Path, name: str):
    def rows(start: int, stop: int) -> np.ndarray:
        # Opened anew each time, so that pages read before are unmapped: they
        # would count as memory in use.
        with safetensors.safe_open(file, framework="numpy") as handle:
            return handle.get_slice(name)[start:stop]

    return rows
