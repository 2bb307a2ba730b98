"""Target models: one configurable decoder, whose families are configurations."""

from specjax.models._config import (
    ROPE_KINDS,
    DecoderConfig,
    Quantization,
    RopeConfig,
)
from specjax.models._decoder import (
    NO_SKIP,
    Decoder,
    Features,
    KVBudget,
    LayerSkip,
)
from specjax.models._families import HF_ARCHITECTURES, config_from_hf
from specjax.models._families_gguf import GGUF_ARCHITECTURES, config_from_gguf
from specjax.models._quantize import quantize
from specjax.models._rope import attention_factor, rope_tables, rotate
from specjax.models._target import (
    CACHE_SLACK,
    Halves,
    Target,
    TargetSpec,
    abstract_params,
    decoder_target,
    init_params,
    logical_axes,
)

__all__ = [
    "CACHE_SLACK",
    "GGUF_ARCHITECTURES",
    "HF_ARCHITECTURES",
    "NO_SKIP",
    "ROPE_KINDS",
    "Decoder",
    "DecoderConfig",
    "Features",
    "Halves",
    "KVBudget",
    "LayerSkip",
    "Quantization",
    "RopeConfig",
    "Target",
    "TargetSpec",
    "abstract_params",
    "attention_factor",
    "config_from_gguf",
    "config_from_hf",
    "decoder_target",
    "init_params",
    "logical_axes",
    "quantize",
    "rope_tables",
    "rotate",
]
