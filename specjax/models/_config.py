"""What a decoder is made of, as frozen, hashable dataclasses."""

import dataclasses
import math
from typing import Literal

from specjax.ops.linear import KernelLayout, check_group

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "factors"]

ROPE_KINDS: tuple[str, ...] = (
    "none",
    "linear",
    "dynamic",
    "llama3",
    "yarn",
    "longrope",
    "factors",
)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding and its context scaling.

    Attributes:
      theta: base of the frequencies.
      kind: scaling type; ``none`` is the plain embedding and ``factors`` divides
        the frequencies by given numbers (GGUF's ``rope_freqs``).
      factor: scaling factor of linear, dynamic, llama3, yarn and longrope.
      original_context: context the model was trained on before scaling, tokens.
      low_freq_factor: llama3, wavelengths longer than original/low are scaled.
      high_freq_factor: llama3, wavelengths shorter than original/high are kept.
      beta_fast: yarn, rotations above which a dimension is extrapolated.
      beta_slow: yarn, rotations below which a dimension is interpolated.
      attention_factor: yarn and longrope, factor on cosines and sines; None
        computes it from the other fields.
      mscale: yarn, DeepSeek's numerator of the attention factor, or None.
      mscale_all_dim: yarn, its denominator, or None.
      truncate: yarn, whether the correction range is rounded to whole dimensions.
      short_factor: longrope, divisors up to the original context.
      long_factor: longrope, divisors beyond it.
      factors: divisors of kind ``factors``.
    """

    theta: float = 10000.0
    kind: RopeKind = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Checks the fields each kind needs."""
        if self.kind not in ROPE_KINDS:
            raise ValueError(
                f"RoPE scaling type {self.kind!r} is not supported; known types are "
                f"{', '.join(ROPE_KINDS)}."
            )
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ValueError(f"RoPE theta={self.theta} must be positive.")
        scaled = self.kind not in ("none", "factors")
        if scaled and not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"RoPE factor={self.factor} must be positive.")
        needs_context = self.kind in ("dynamic", "llama3", "yarn", "longrope")
        if needs_context and self.original_context < 1:
            raise ValueError(
                f"RoPE scaling {self.kind!r} needs original_context, the length the "
                f"model was trained on; got {self.original_context}."
            )


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How the kernels of a decoder are rounded; see ``ops.linear.QuantizedKernel``.

    Attributes:
      bits: of a weight, 8 or 4.
      group: weights of a row that share a scale; None: the whole row.
    """

    bits: int
    group: int | None = None


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer. Model families are values of this, not forks.

    Attributes:
      vocab_size: rows of the embedding (padding rows included).
      width: model width D.
      n_layers: transformer blocks.
      n_heads: query heads H.
      n_kv_heads: key/value heads K; divides n_heads.
      head_width: width of a head M.
      ff_width: feed-forward width F.
      norm_eps: epsilon of the RMS norms.
      rope: rotary embedding.
      max_context: longest context the model is meant for, tokens.
      tied_head: the head is the embedding.
      qkv_bias: biases on the q, k and v projections.
      out_bias: bias on the attention output projection.
      ff_bias: biases on the feed-forward projections.
      qk_norm: RMS norm over each head's query and key before the rotation.
      windows: sliding window of each layer in tokens (None: full attention);
        empty for no windows at all.
      dtype: of parameters, matmul inputs and the cache: float32 or bfloat16.
        Norms, softmax, the residual stream and logits are float32 in any case.
      kernel_layout: how projection kernels are stored; see ``ops.linear``.
      quantization: of all projection kernels and of the head, which then is not tied;
        None for none. Embedding, norms and biases stay in ``dtype``.
      family: name of the model family, for messages and checkpoints.
    """

    vocab_size: int
    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_width: int
    ff_width: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    max_context: int = 2048
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    ff_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    dtype: str = "float32"
    kernel_layout: KernelLayout = "in_out"
    quantization: Quantization | None = None
    family: str = "llama"

    def __post_init__(self) -> None:
        """Checks that the sizes fit together."""
        sizes = ("vocab_size", "width", "n_layers", "n_heads", "n_kv_heads")
        for name in (*sizes, "head_width", "ff_width", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is no multiple of n_kv_heads="
                f"{self.n_kv_heads}."
            )
        if self.head_width % 2:
            raise ValueError(f"head_width={self.head_width} must be even for RoPE.")
        if self.windows and len(self.windows) != self.n_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries for {self.n_layers} layers."
            )
        if any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"windows={self.windows} must be at least 1 or None.")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f"dtype={self.dtype!r} is not supported; use 'float32' or 'bfloat16'."
            )
        if self.quantization is not None:
            self._check_quantization(self.quantization)

    def _check_quantization(self, how: Quantization) -> None:
        """Checks that every kernel can be cut into groups."""
        inputs = {
            "width": self.width,
            "n_heads * head_width": self.n_heads * self.head_width,
            "ff_width": self.ff_width,
        }
        for name, size in inputs.items():
            check_group(how.bits, how.group, size, name)
        if self.tied_head or self.kernel_layout != "out_in":
            raise ValueError(
                "quantised kernels are [out, in] and the head one of them: "
                f"tied_head={self.tied_head} and kernel_layout={self.kernel_layout!r} "
                "must be False and 'out_in'; models.quantize makes it so."
            )

    def window(self, layer: int) -> int | None:
        """Returns a layer's sliding window in tokens, or None."""
        return self.windows[layer] if self.windows else None
