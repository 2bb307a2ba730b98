"""Saves and restores models as Orbax checkpoints.

A checkpoint is a directory: ``params`` (Orbax's own format), ``tokenizer`` and
``specjax.json``. The last is written last, so a directory without it is a save that
did not finish.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from specjax.models import DecoderConfig, Quantization, RopeConfig, abstract_params
from specjax.ops.linear import preferred_layout
from specjax.sharding import DEFAULT_RULES, Rules, param_shardings
from specjax.text import Tokenizer
from specjax.typing import Params
from specjax.weights._assemble import (
    flat_abstract,
    flat_params,
    nested_params,
    raise_problems,
)
from specjax.weights._hf import read_json
from specjax.weights._model import Model, make_model, make_text_side

#: The file that makes a directory a checkpoint.
MANIFEST = "specjax.json"
_FORMAT = 1


def save_orbax(path: str | os.PathLike[str], model: Model) -> None:
    """Saves a model as a new directory.

    Over several hosts, all of them call this with the same shared path.

    Args:
      path: the directory; it must not exist.
      model: what to save.

    Raises:
      FileExistsError: the path exists.
    """
    import orbax.checkpoint as ocp  # two seconds, and only needed here

    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(
            f"{path} exists, and a checkpoint is never written over. Choose another "
            "path, or remove it first."
        )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "params", model.params)
        checkpointer.wait_until_finished()
    if jax.process_index() != 0:
        return
    if model.tokenizer is not None:
        model.tokenizer.save(path / "tokenizer")
    manifest = {
        "format": _FORMAT,
        "name": model.name,
        "tokenizer": model.tokenizer is not None,
        "eos_ids": list(model.eos_ids),
        "config": config_to_json(model.config),
    }
    text = json.dumps(manifest, indent=2) + "\n"
    (path / MANIFEST).write_text(text, "utf-8")


def load_orbax(
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Model:
    """Restores what ``save_orbax`` saved.

    Each device reads its own part of the parameters. Kernels are transposed after
    that where another layout is faster for the dtype and platform at hand.

    Args:
      path: the directory.
      dtype: of the parameters, ``float32`` or ``bfloat16``; None keeps the saved.
      mesh: devices to shard the parameters over, or None for the first device.
      rules: logical axis -> mesh axis; see ``sharding``.

    Returns:
      The model.

    Raises:
      FileNotFoundError: there is no such directory, or its save did not finish.
      ValueError: the checkpoint is of a later format, or its parameters are not
        those of its configuration; the message lists them.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    manifest = _read_manifest(path)
    stored = config_from_json(manifest["config"])
    config = dataclasses.replace(stored, dtype=dtype or stored.dtype)
    config = dataclasses.replace(
        config, kernel_layout=preferred_layout(jnp.dtype(config.dtype))
    )
    tokenizer = None
    if manifest["tokenizer"]:
        tokenizer = Tokenizer.from_directory(path / "tokenizer")
    text = make_text_side(
        config, tokenizer, origin=str(path), eos_ids=tuple(manifest["eos_ids"])
    )
    as_stored = dataclasses.replace(stored, dtype=config.dtype)
    wanted = _placed_abstract(as_stored, mesh, rules)
    # Parameters are read side by side, as many as this lets; it must admit one.
    largest_bytes = 4 * max(leaf.size for leaf in flat_abstract(config).values())
    limit_gb = 1 + 2 * largest_bytes // 10**9
    with ocp.StandardCheckpointer(restore_concurrent_gb=limit_gb) as checkpointer:
        metadata = checkpointer.metadata(path / "params").item_metadata
        _check_shapes(as_stored, flat_params(metadata.tree), str(path))
        params = checkpointer.restore(path / "params", wanted)
    if config.kernel_layout != stored.kernel_layout:
        params = _transpose(params, _placed_abstract(config, mesh, rules))
    return make_model(manifest["name"], config, params, text)


def orbax_config(path: Path, dtype: str) -> DecoderConfig:
    """Reads a checkpoint's configuration; raises as ``load_orbax`` does."""
    config = config_from_json(_read_manifest(path)["config"])
    return dataclasses.replace(config, dtype=dtype)


def _read_manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise FileNotFoundError(f"There is no directory {path}.")
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(
            f"{path} has no {MANIFEST}: it is no specjax checkpoint, or saving it did "
            "not finish. Save it again."
        )
    manifest = read_json(path / MANIFEST)
    if manifest.get("format") != _FORMAT:
        raise ValueError(
            f"{path / MANIFEST} has format {manifest.get('format')!r}; this version "
            f"reads {_FORMAT}."
        )
    missing = {"name", "tokenizer", "eos_ids", "config"} - manifest.keys()
    if missing:
        raise ValueError(f"{path / MANIFEST} lacks {', '.join(sorted(missing))}.")
    return manifest


def _placed_abstract(config: DecoderConfig, mesh: Mesh | None, rules: Rules) -> Params:
    abstract = abstract_params(config)
    if mesh is None:
        one = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: one, abstract)
    else:
        shardings = param_shardings(config, mesh, rules)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        abstract,
        shardings,
    )


def _check_shapes(config: DecoderConfig, stored: dict[str, Any], origin: str) -> None:
    problems = []
    wanted = flat_abstract(config)
    for path, leaf in wanted.items():
        if path not in stored:
            problems.append(f"missing: {path} {list(leaf.shape)}")
        elif tuple(stored[path].shape) != leaf.shape:
            problems.append(
                f"wrong shape: {path} is {list(stored[path].shape)}, the configuration "
                f"needs {list(leaf.shape)}"
            )
    problems += [f"not part of the model: {p}" for p in stored if p not in wanted]
    raise_problems(origin, config, problems)


def _transpose(params: Params, wanted: Params) -> Params:
    """Transposes kernels one at a time, so that only one is held twice."""
    flat, targets = flat_params(params), flat_params(wanted)
    del params
    for path, target in targets.items():
        if path.endswith(".kernel"):
            turned = jax.device_put(flat.pop(path).T, target.sharding)
            flat[path] = turned.block_until_ready()
    return nested_params({path: flat[path] for path in targets})


def config_to_json(config: DecoderConfig) -> dict[str, Any]:
    """Returns a configuration as JSON values.

    Args:
      config: the decoder.

    Returns:
      Nested dictionaries, which ``config_from_json`` turns back.
    """
    values = dataclasses.asdict(config)
    if config.quantization is None:  # versions that do not know it read the rest
        del values["quantization"]
    return values


def config_from_json(values: Mapping[str, Any]) -> DecoderConfig:
    """Undoes ``config_to_json``.

    Fields that the values lack take their defaults, so that configurations saved
    before a field existed stay readable.

    Args:
      values: parsed JSON.

    Returns:
      The configuration.

    Raises:
      ValueError: a field is not known (a later version saved it), or one without
        a default is missing.
    """
    values = dict(values)
    rope = dict(values.pop("rope", {}))
    if values.get("quantization") is not None:
        values["quantization"] = Quantization(**values["quantization"])
    made = []
    for kind, fields in ((RopeConfig, rope), (DecoderConfig, values)):
        known = {field.name for field in dataclasses.fields(kind)}
        unknown = sorted(fields.keys() - known)
        needed = {
            field.name
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING
        }
        missing = sorted(needed - fields.keys())
        if unknown or missing:
            raise ValueError(
                f"The saved configuration has unknown fields {unknown} and lacks "
                f"{missing}; it may be of another version of specjax."
            )
        made.append(
            {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        )
    return DecoderConfig(rope=RopeConfig(**made[0]), **made[1])
