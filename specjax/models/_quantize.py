"""A decoder in int8 or int4, made of its own parameters."""

import dataclasses
from typing import Any

import jax

from specjax.models._config import DecoderConfig, Quantization
from specjax.ops.linear import quantize_kernel
from specjax.typing import Array, Params


def quantize(
    config: DecoderConfig, params: Params, how: Quantization
) -> tuple[DecoderConfig, Params]:
    """Rounds the kernels of a decoder and its head.

    The embedding is looked up as it is and shared with ``params``, as norms and biases
    are. A tied head becomes a quantised one of its own: it is read whole at each pass,
    while of the embedding a pass reads a row for each token.

    Args:
      config: the decoder.
      params: its parameters; they stay as they are.
      how: bits and groups.

    Returns:
      The quantised decoder's configuration and parameters, for ``decoder_target``.

    Raises:
      ValueError: the decoder is quantised already, or its widths cannot be cut into
        such groups.
    """
    if config.quantization is not None:
        raise ValueError(
            f"the decoder is quantised already ({config.quantization}); quantise the "
            "parameters that it was made of."
        )
    quantized = dataclasses.replace(
        config, quantization=how, tied_head=False, kernel_layout="out_in"
    )
    turned = config.kernel_layout == "in_out"

    def rounded(kernel: Array) -> dict[str, Array]:
        return quantize_kernel(kernel, bits=how.bits, group=how.group)._asdict()

    def convert(path: tuple[Any, ...], x: Array) -> Any:
        if getattr(path[-1], "key", None) != "kernel":
            return x
        return rounded(x.T if turned else x)

    made = jax.tree_util.tree_map_with_path(convert, params)
    if config.tied_head:
        made["head"] = {"kernel": rounded(params["embedding"])}
    return quantized, made
