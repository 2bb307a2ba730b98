"""A model in small integers as its own drafter."""

from typing import Literal

from specjax.drafters._drawing import Draws
from specjax.drafters._from_model import ModelLike
from specjax.drafters._protocol import BoundDrafter
from specjax.drafters._self_draft import self_draft
from specjax.models import Quantization, decoder_target, quantize

#: Weights that share a scale where the caller does not say: a whole row in int8.
QUANTIZED_GROUPS: dict[int, int | None] = {8: None, 4: 32}


def quantized(
    target: ModelLike,
    gamma: int = 4,
    *,
    bits: int = 8,
    group: int | None | Literal["default"] = "default",
    draws: Draws = "sample",
) -> BoundDrafter:
    """Makes a model its own drafter, with its weights rounded to int8 or int4.

    A pass then reads a half (int8) or a quarter (int4) of what it reads in bfloat16,
    and attends to the keys and values that the target computed. Embedding, norms and
    biases are the target's own arrays. Reference: Tiwari et al., "QuantSpec",
    arXiv:2502.10424. Differs from it: keys and values stay as they are.

    On a CPU arithmetic is the limit: a one-row pass of SmolLM2-135M takes 0.71 of its
    bfloat16 time in int8 and 0.83 in int4, at four rows 0.57 and 0.65. Of its greedy
    drafts 0.99 are kept in int8, and in int4 0.75, 0.73 and 0.67 with groups of 32, 64
    and 192. On TPUs groups cost a copy of the packed weights a pass; one scale a row
    does not (``ops.linear``).

    Args:
      target: the model.
      gamma: draft tokens a pass.
      bits: of a weight, 8 or 4.
      group: weights that share a scale, a divisor of every kernel's inputs; None: a
        whole row. By default a row for 8 bits, 32 weights for 4.
      draws: see ``drafters.model``.

    Returns:
      The drafter with rounded copies of the kernels and the head, computed once, here.

    Raises:
      ValueError: the bits are not supported, the group divides some kernel's inputs
        not, or the target is quantised itself.
    """
    if group == "default":
        group = QUANTIZED_GROUPS.get(bits)
    how = Quantization(bits, group)
    config, params = quantize(target.config, target.params, how)
    form = decoder_target(config)
    return BoundDrafter(
        self_draft(form, gamma, n_ids=target.n_ids, draws=draws, name=f"int{bits}"),
        params,
    )
