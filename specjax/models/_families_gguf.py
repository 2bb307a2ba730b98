"""Model families: the metadata of a GGUF file to a DecoderConfig."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.models._config import DecoderConfig, RopeConfig
from specjax.models._families import default_layout, divisors, scaled_context
from specjax.ops.linear import KernelLayout

#: ``general.architecture`` of GGUF files; ``llama`` is Mistral and SmolLM2 too.
GGUF_ARCHITECTURES: tuple[str, ...] = ("llama", "qwen2", "qwen3")


def config_from_gguf(
    fields: Mapping[str, Any],
    tensor_shapes: Mapping[str, Sequence[int]],
    *,
    rope_tensors: Mapping[str, Sequence[float]] | None = None,
    dtype: str = "float32",
    kernel_layout: KernelLayout | None = None,
) -> DecoderConfig:
    """Reads the metadata of a GGUF file.

    Sizes come from the metadata; which biases and norms there are, whether the
    head is tied, and the number of embedding rows come from the tensors.

    Args:
      fields: metadata as plain Python values, by full name.
      tensor_shapes: shape of each tensor, in row-major order ([rows, columns]).
      rope_tensors: values of ``rope_freqs.weight``, ``rope_factors_short.weight``
        and ``rope_factors_long.weight``, those of them that the file holds.
      dtype: of the parameters, ``float32`` or ``bfloat16``.
      kernel_layout: how projection kernels are stored; None takes the fastest
        for ``dtype`` here.

    Returns:
      The configuration.

    Raises:
      ValueError: the architecture, or something it is asked to do, is not
        supported, or a field is missing; the message names it.
    """
    arch = fields.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ValueError(
            f"GGUF architecture {arch!r} is not supported; supported are "
            f"{', '.join(GGUF_ARCHITECTURES)}."
        )
    get = _GgufFields(fields, arch)
    get.refuse()
    if "token_embd.weight" not in tensor_shapes:
        raise ValueError("The GGUF file has no tensor token_embd.weight.")
    width, n_heads = get("embedding_length"), get("attention.head_count")
    head_width = _head_width(get, width, n_heads)
    rope = _gguf_rope(get, rope_tensors or {}, head_width)
    n_layers, context = get("block_count"), get("context_length")
    return DecoderConfig(
        vocab_size=int(tensor_shapes["token_embd.weight"][0]),
        width=width,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=get("attention.head_count_kv", n_heads),
        head_width=head_width,
        ff_width=get("feed_forward_length"),
        norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
        rope=rope,
        max_context=scaled_context(rope, context),
        tied_head="output.weight" not in tensor_shapes,
        qkv_bias="blk.0.attn_q.bias" in tensor_shapes,
        out_bias="blk.0.attn_output.bias" in tensor_shapes,
        ff_bias="blk.0.ffn_up.bias" in tensor_shapes,
        qk_norm=arch == "qwen3",
        windows=_gguf_windows(get, n_layers, context),
        dtype=dtype,
        kernel_layout=kernel_layout or default_layout(dtype),
        family=arch,
    )


def _head_width(get: "_GgufFields", width: int, n_heads: int) -> int:
    if not get.has("attention.key_length") and width % n_heads:
        raise ValueError(
            f"{get.arch}.embedding_length={width} is no multiple of {n_heads} heads "
            "and there is no attention.key_length."
        )
    head_width = get("attention.key_length", width // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_width) != head_width:
            raise ValueError(
                f"{get.arch}.{key}={get(key)} differs from the head width "
                f"{head_width}, which is not supported."
            )
    return head_width


class _GgufFields:
    """Metadata of one architecture; ``get("block_count")`` is required."""

    def __init__(self, fields: Mapping[str, Any], arch: str) -> None:
        self.fields = fields
        self.arch = arch

    def __call__(self, key: str, default: Any = None) -> Any:
        name = f"{self.arch}.{key}"
        value = self.fields.get(name, default)
        if value is None:
            raise ValueError(f"The GGUF file has no field {name}.")
        if isinstance(value, list) and key != "attention.sliding_window_pattern":
            # Some converters write one number a layer; the decoder has one.
            if len(set(value)) != 1:
                raise ValueError(
                    f"{name}={value} differs between layers, which is not supported."
                )
            value = value[0]
        return value

    def has(self, key: str) -> bool:
        return self.fields.get(f"{self.arch}.{key}") is not None

    def refuse(self) -> None:
        """Raises on fields that change the arithmetic in ways not supported."""
        neutral = {
            "expert_count": 0,
            "expert_used_count": 0,
            "logit_scale": 1.0,
            "residual_scale": 1.0,
            "embedding_scale": 1.0,
            "attention.scale": None,
            "attention.temperature_scale": None,
            "rope.scaling.alpha": 0.0,
            "rope.dimension_sections": None,
        }
        for key, value in neutral.items():
            # Writers put a zero where a scale is not used.
            if self.has(key) and self(key) not in (value, 0):
                raise ValueError(
                    f"{self.arch}.{key}={self(key)} is not supported"
                    + ("; mixtures of experts are not." if "expert" in key else ".")
                )


def _gguf_windows(get: _GgufFields, n_layers: int, context: int):
    window = get("attention.sliding_window", 0)
    if window == 0 or window >= context:
        return ()
    if not get.has("attention.sliding_window_pattern"):
        if get.arch == "llama":
            return (window,) * n_layers
        raise ValueError(
            f"{get.arch}.attention.sliding_window={window} without a "
            "sliding_window_pattern does not say which layers have the window."
        )
    pattern = get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != n_layers:
        raise ValueError(
            f"{get.arch}.attention.sliding_window_pattern={pattern} must be one "
            f"boolean for each of {n_layers} layers."
        )
    return tuple(window if on else None for on in pattern)


def _gguf_rope(
    get: _GgufFields, tensors: Mapping[str, Sequence[float]], head_width: int
) -> RopeConfig:
    """Rotary embedding as llama.cpp computes it from the metadata."""
    theta = _shortest(get("rope.freq_base", 10000.0))
    factor = _shortest(get("rope.scaling.factor", get("rope.scale_linear", 0.0)) or 1.0)
    # llama.cpp takes a factor without a type for linear scaling.
    kind = get("rope.scaling.type", "linear")
    scale = _shortest(get("rope.scaling.attn_factor", 1.0))
    original = get("rope.scaling.original_context_length", get("context_length"))
    freqs = tensors.get("rope_freqs.weight")
    if kind == "longrope":
        if freqs is not None or factor != 1.0:
            raise ValueError(f"{kind} with rope_freqs or {factor=} is not supported.")
        lists = {}
        for name in ("short", "long"):
            tensor = f"rope_factors_{name}.weight"
            if tensor not in tensors:
                raise ValueError(f"longrope needs the tensor {tensor}.")
            lists[f"{name}_factor"] = divisors(tensors[tensor], head_width, tensor)
        return RopeConfig(
            theta=theta,
            kind="longrope",
            original_context=original,
            attention_factor=scale,
            **lists,
        )
    if any(name.startswith("rope_factors") for name in tensors):
        raise ValueError(f"rope_factors tensors with scaling {kind!r}, not longrope.")
    if kind == "yarn":
        if freqs is not None:
            raise ValueError("yarn with rope_freqs is not supported.")
        return _gguf_yarn(get, theta, factor, original, scale)
    if kind not in ("none", "linear"):
        raise ValueError(
            f"{get.arch}.rope.scaling.type={kind!r} is not supported; none, linear, "
            "yarn and longrope are."
        )
    if scale != 1.0:
        raise ValueError(f"attn_factor={scale} with scaling {kind!r} is not supported.")
    factor = 1.0 if kind == "none" else factor
    if freqs is not None:
        # Both divide the frequencies.
        freqs = divisors(freqs, head_width, "rope_freqs.weight")
        freqs = tuple(value * factor for value in freqs)
        return RopeConfig(theta=theta, kind="factors", factors=freqs)
    if factor == 1.0:
        return RopeConfig(theta=theta)
    return RopeConfig(theta=theta, kind="linear", factor=factor)


def _gguf_yarn(
    get: _GgufFields, theta: float, factor: float, original: int, scale: float
) -> RopeConfig:
    extrapolation = get("rope.scaling.yarn_ext_factor", 1.0)
    if extrapolation != 1.0:
        raise ValueError(f"yarn_ext_factor={extrapolation} is not supported; only 1.")
    log_multiplier = _shortest(get("rope.scaling.yarn_log_multiplier", 0.0))
    magnitude = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
    if log_multiplier and factor > 1:
        magnitude /= 0.1 * log_multiplier * math.log(factor) + 1.0
    if get.has("rope.scaling.yarn_attn_factor"):
        magnitude = _shortest(get("rope.scaling.yarn_attn_factor"))
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=_shortest(get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=_shortest(get("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=magnitude * scale,
    )


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(value)))
