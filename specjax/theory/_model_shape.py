"""What a model makes a device read and compute, in bytes and FLOP."""

import dataclasses
from typing import Any

from specjax.theory._check import FloatArray, real, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Counts that the roofline of a pass needs; one model, all devices together.

    ``ModelShape.decoder`` computes them from the widths of a dense decoder. Latent or
    windowed attention is a matter of ``kv_bytes_per_token`` and of the context given
    to the roofline.

    Attributes:
      n_params: parameters multiplied for each row (of a mixture, the active ones);
        not the embedding table, of which only rows are looked up.
      weight_bytes: read by every pass, however many rows it has; not the routed
        experts.
      kv_bytes_per_token: keys and values of one token, all layers.
      attention_flops: FLOP of one row attending one position, all layers.
      activation_bytes_per_row: written and read between products.
      reduced_bytes_per_row: summed over devices under tensor parallelism, all
        reductions of a pass together.
      n_reductions: all-reduces of a pass.
      expert_weight_bytes: all routed experts of all layers together, 0 for a dense
        model.
      n_experts: routed experts a layer.
      n_experts_per_token: of which a token takes this many.
    """

    n_params: float
    weight_bytes: float
    kv_bytes_per_token: float = 0.0
    attention_flops: float = 0.0
    activation_bytes_per_row: float = 0.0
    reduced_bytes_per_row: float = 0.0
    n_reductions: int = 0
    expert_weight_bytes: float = 0.0
    n_experts: int = 0
    n_experts_per_token: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            real(field.name, value, least=0, remedy="It is a count or a size.")
        if self.weight_bytes + self.expert_weight_bytes <= 0:
            raise ValueError(
                f"weight_bytes={self.weight_bytes:g} leaves a pass nothing to read; "
                "give the bytes of the weights."
            )
        routed = self.expert_weight_bytes > 0
        if routed and not 0 < self.n_experts_per_token <= self.n_experts:
            raise ValueError(
                f"expert_weight_bytes={self.expert_weight_bytes:g} needs "
                f"0 < n_experts_per_token <= n_experts, not {self.n_experts_per_token} "
                f"and {self.n_experts}."
            )

    @classmethod
    def decoder(
        cls,
        *,
        n_layers: int,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_width: int,
        d_ff: int,
        vocab_size: int,
        bytes_per_param: float = 2.0,
        kv_bytes_per_element: float = 2.0,
        activation_bytes_per_element: float = 2.0,
    ) -> "ModelShape":
        """Counts a dense decoder with gated feed-forward layers (Llama, Qwen).

        Norms and biases are left out. Activations are what lies between fused
        products, each written once and read once; logits are float32. Every layer
        has two all-reduces of a row's ``d_model`` elements.

        Args:
          n_layers: of the decoder.
          d_model: model width.
          n_heads: query heads.
          n_kv_heads: key/value heads.
          head_width: of each.
          d_ff: feed-forward width.
          vocab_size: rows of the head.
          bytes_per_param: 2 for bfloat16, 0.5 for 4 bits and so on.
          kv_bytes_per_element: of the cache.
          activation_bytes_per_element: of activations.

        Returns:
          The counts.

        Raises:
          ValueError: a count is not whole and positive, a byte size not positive.
        """
        _check_widths(locals())
        queries, keys = n_heads * head_width, n_kv_heads * head_width
        layer = d_model * (2 * queries + 2 * keys) + 3 * d_model * d_ff
        n_params = n_layers * layer + vocab_size * d_model
        elements = 6 * d_model + 4 * queries + 2 * keys + 6 * d_ff
        activations = n_layers * elements * activation_bytes_per_element
        return cls(
            n_params=n_params,
            weight_bytes=n_params * bytes_per_param,
            kv_bytes_per_token=2 * n_layers * keys * kv_bytes_per_element,
            attention_flops=4 * n_layers * queries,
            activation_bytes_per_row=activations + 2 * 4 * vocab_size,
            reduced_bytes_per_row=2 * n_layers * d_model * activation_bytes_per_element,
            n_reductions=2 * n_layers,
        )

    def read_weight_bytes(self, n_rows: FloatArray | float) -> FloatArray | float:
        """Computes the weight bytes that a pass over ``n_rows`` rows reads.

        Of a mixture of experts, those experts are read that some row takes; rows are
        taken to choose independently and evenly, so each of n experts, k a token, is
        read with probability 1 - (1 - k/n)^n_rows. Real routing is correlated along a
        text and reads fewer.

        Args:
          n_rows: rows of the pass over the whole batch, >= 1.

        Returns:
          Bytes, of the shape of ``n_rows``.
        """
        if not self.expert_weight_bytes:
            return self.weight_bytes + 0.0 * n_rows
        missed = (1 - self.n_experts_per_token / self.n_experts) ** n_rows
        return self.weight_bytes + self.expert_weight_bytes * (1 - missed)


def _check_widths(arguments: dict[str, Any]) -> None:
    """Checks the arguments of ``ModelShape.decoder``."""
    for name, value in arguments.items():
        if name.startswith(("n_", "d_")) or name in ("head_width", "vocab_size"):
            whole(name, value, least=1, remedy="See the model's configuration.")
        elif name != "cls":
            remedy = "2 is bfloat16, 0.5 is 4 bits."
            real(name, value, least=0, open_least=True, remedy=remedy)
