"""Models from GGUF, Hugging Face and Orbax, placed one tensor at a time."""

from specjax.weights._gguf import load_gguf
from specjax.weights._hf import load_hf
from specjax.weights._load import KNOWN_MODELS, KnownModel, load, load_config, load_hub
from specjax.weights._model import Model
from specjax.weights._names import checkpoint_name
from specjax.weights._orbax import (
    config_from_json,
    config_to_json,
    load_orbax,
    save_orbax,
)

__all__ = [
    "KNOWN_MODELS",
    "KnownModel",
    "Model",
    "checkpoint_name",
    "config_from_json",
    "config_to_json",
    "load",
    "load_config",
    "load_gguf",
    "load_hf",
    "load_hub",
    "load_orbax",
    "save_orbax",
]
