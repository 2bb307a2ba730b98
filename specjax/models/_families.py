"""Model families: a Hugging Face config to a DecoderConfig.

Nothing is guessed. What a checkpoint's metadata asks for and the decoder cannot do
is an error that names it, since a model that loads and computes something slightly
different is the worst outcome there is.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from specjax.models._config import DecoderConfig, RopeConfig
from specjax.ops.linear import KernelLayout, preferred_layout

#: Hugging Face architecture -> family. SmolLM2 is a LlamaForCausalLM.
HF_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Where a missing key has a meaning of its own, or a default that has changed.
_REQUIRED_BY_FAMILY = {
    "llama": (),
    "mistral": ("num_key_value_heads", "sliding_window"),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
}
# Rope keys of a Hugging Face config that each type reads: (required, optional).
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor"),
        ("original_max_position_embeddings",),
    ),
    "yarn": (
        (),
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        ("factor", "original_max_position_embeddings", "attention_factor"),
    ),
}


def config_from_hf(
    config: Mapping[str, Any],
    *,
    dtype: str = "float32",
    kernel_layout: KernelLayout | None = None,
) -> DecoderConfig:
    """Reads the contents of a Hugging Face ``config.json``.

    Both spellings of the rotary embedding are understood: ``rope_theta`` with
    ``rope_scaling``, and transformers 5's ``rope_parameters``. With YaRN and
    dynamic scaling, ``max_context`` is the scaled length when that is longer.

    Args:
      config: the parsed file.
      dtype: of the parameters, ``float32`` or ``bfloat16``.
      kernel_layout: how projection kernels are stored; None takes the fastest
        for ``dtype`` here.

    Returns:
      The configuration.

    Raises:
      ValueError: the architecture, or something it is asked to do, is not
        supported, or a key is missing; the message names it.
    """
    family = _hf_family(config)
    required = (*_REQUIRED, *_REQUIRED_BY_FAMILY[family])
    missing = [key for key in required if key not in config]
    if missing:
        raise ValueError(f"config.json of a {family} model lacks {', '.join(missing)}.")
    for key in _REQUIRED:
        if isinstance(config[key], bool) or not isinstance(config[key], (int, float)):
            raise ValueError(f"{key}={config[key]!r} in config.json must be a number.")
    _refuse_hf(config)
    n_layers, n_heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_width = _hf_head_width(config)
    n_kv_heads = config.get("num_key_value_heads")
    rope = _hf_rope(config, head_width)
    attention_bias = _flag(config, "attention_bias", family in ("llama", "qwen3"))
    return DecoderConfig(
        vocab_size=config["vocab_size"],
        width=config["hidden_size"],
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        head_width=head_width,
        ff_width=config["intermediate_size"],
        norm_eps=float(config["rms_norm_eps"]),
        rope=rope,
        max_context=scaled_context(rope, config["max_position_embeddings"]),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        ff_bias=_flag(config, "mlp_bias", family == "llama"),
        qk_norm=family == "qwen3",
        windows=_hf_windows(config, family, n_layers),
        dtype=dtype,
        kernel_layout=kernel_layout or default_layout(dtype),
        family=family,
    )


def default_layout(dtype: str) -> KernelLayout:
    """Returns the fastest kernel layout here for a supported dtype's name."""
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"dtype={dtype!r} is not supported; use 'float32' or 'bfloat16'."
        )
    return preferred_layout(jnp.dtype(dtype))


def _hf_head_width(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    width, n_heads = config["hidden_size"], config["num_attention_heads"]
    if width % n_heads:
        raise ValueError(
            f"hidden_size={width} is no multiple of num_attention_heads={n_heads} and "
            "there is no head_dim."
        )
    return width // n_heads


def _hf_family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    supported = ", ".join(HF_ARCHITECTURES)
    if len(architectures) != 1:
        raise ValueError(
            f"config.json names architectures={architectures}; exactly one is needed, "
            f"of {supported}."
        )
    if architectures[0] not in HF_ARCHITECTURES:
        raise ValueError(
            f"Architecture {architectures[0]} is not supported; supported are "
            f"{supported}."
        )
    return HF_ARCHITECTURES[architectures[0]]


def _refuse_hf(config: Mapping[str, Any]) -> None:
    """Raises on what the decoder cannot do."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act={activation!r} is not supported; only 'silu' is.")
    if config.get("quantization_config") is not None:
        raise ValueError(
            "config.json has a quantization_config: quantised safetensors are not "
            "supported. Load the unquantised checkpoint, or a GGUF file."
        )
    if config.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"partial_rotary_factor={config['partial_rotary_factor']} is not "
            "supported; only 1 is."
        )
    if config.get("rope_interleaved"):
        raise ValueError("rope_interleaved=true is not supported.")


def _flag(config: Mapping[str, Any], key: str, supported: bool) -> bool:
    """A bias flag; families whose layers never have one must not ask for it."""
    return supported and bool(config.get(key, False))


def _hf_windows(
    config: Mapping[str, Any], family: str, n_layers: int
) -> tuple[int | None, ...]:
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if kinds is not None:
        known = {"full_attention", "sliding_attention"}
        if len(kinds) != n_layers or not known.issuperset(kinds):
            raise ValueError(
                f"layer_types must give each of {n_layers} layers one of "
                f"{sorted(known)}; got {kinds}."
            )
    if family == "llama":
        windowed = [False] * n_layers
    elif family == "mistral":
        windowed = [window is not None] * n_layers
    else:
        use = bool(config.get("use_sliding_window", False))
        first = config.get("max_window_layers", n_layers)
        windowed = [use and window is not None and i >= first for i in range(n_layers)]
        if use and kinds is not None:
            windowed = [kind == "sliding_attention" for kind in kinds]
        elif use and window is not None and "max_window_layers" not in config:
            raise ValueError(
                "use_sliding_window needs layer_types or max_window_layers."
            )
    if kinds is not None:
        asked = [kind == "sliding_attention" for kind in kinds]
        if asked != windowed:
            raise ValueError(
                f"layer_types={kinds} contradicts the sliding window of this {family} "
                f"model (sliding_window={window}, use_sliding_window="
                f"{config.get('use_sliding_window')})."
            )
    if not any(windowed):
        return ()
    if not isinstance(window, int):
        raise ValueError(f"sliding_window={window!r} must be a number of tokens.")
    return tuple(window if on else None for on in windowed)


def scaled_context(rope: RopeConfig, max_position: int) -> int:
    """Returns the context of a model once its rotary embedding is scaled."""
    if rope.kind in ("yarn", "dynamic"):
        return max(max_position, int(rope.factor * rope.original_context))
    return max_position


def _hf_rope_keys(config: Mapping[str, Any]) -> tuple[str, float, dict[str, Any]]:
    """Returns type, theta and the remaining keys, whichever way they are spelt."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and dict(old) != dict(new):
        raise ValueError(
            f"rope_scaling={old} and rope_parameters={new} differ; keep one."
        )
    keys = dict(new or old or {})
    if any(isinstance(value, Mapping) for value in keys.values()):
        raise ValueError(
            f"RoPE parameters that differ between layer types are not supported: {keys}"
        )
    theta = keys.pop("rope_theta", None)
    theta = config.get("rope_theta", 10000.0) if theta is None else theta
    kind, alias = keys.pop("rope_type", None), keys.pop("type", None)
    if kind is not None and alias is not None and kind != alias:
        raise ValueError(f"rope_type={kind!r} and type={alias!r} differ; keep one.")
    partial = keys.pop("partial_rotary_factor", 1)
    if partial not in (None, 1, 1.0):
        raise ValueError(
            f"partial_rotary_factor={partial} is not supported; only 1 is."
        )
    return kind or alias or "default", float(theta), keys


def _hf_rope(config: Mapping[str, Any], head_width: int) -> RopeConfig:
    kind, theta, keys = _hf_rope_keys(config)
    if kind not in _ROPE_KEYS:
        raise ValueError(
            f"RoPE scaling type {kind!r} is not supported; known types are "
            f"{', '.join(_ROPE_KEYS)}."
        )
    required, optional = _ROPE_KEYS[kind]
    # A null is what transformers writes for "not set".
    keys = {key: value for key, value in keys.items() if value is not None}
    missing = [key for key in required if key not in keys]
    unknown = [key for key in keys if key not in (*required, *optional)]
    if missing or unknown:
        raise ValueError(
            f"RoPE scaling {kind!r}: missing keys {missing}, keys it does not know "
            f"{unknown}."
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    longest = config["max_position_embeddings"]
    fields: dict[str, Any] = {"theta": theta, "kind": kind}
    if kind == "dynamic":
        fields["original_context"] = longest
    elif kind != "linear":
        # transformers gives the top-level key priority.
        top = config.get("original_max_position_embeddings")
        nested = keys.pop("original_max_position_embeddings", longest)
        fields["original_context"] = int(nested if top is None else top)
        keys.setdefault("factor", longest / fields["original_context"])
    if kind == "yarn":
        # transformers reads a zero as not set.
        keys = {k: v for k, v in keys.items() if v or not k.startswith("beta_")}
    for name in ("short_factor", "long_factor"):
        if name in keys:
            keys[name] = divisors(keys[name], head_width, name)
    return RopeConfig(**fields, **keys)


def divisors(values: Sequence[float], head_width: int, name: str) -> tuple[float, ...]:
    """Checks that there is one positive divisor for each rotated pair."""
    values = tuple(float(value) for value in values)
    if len(values) != head_width // 2 or not all(0 < v < math.inf for v in values):
        raise ValueError(
            f"RoPE {name} must be {head_width // 2} positive numbers for heads of "
            f"width {head_width}; got {len(values)}: {values}."
        )
    return values
