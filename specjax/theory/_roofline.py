"""The least time of one pass: bytes over bandwidth or FLOP over rate, plus the link.

A pass has two kinds of work, which follow each other and are each bound by memory or
by arithmetic, whichever takes longer: products with weights, whose bytes do not grow
with the rows, and attention, whose bytes grow with batch * context while all rows of
a sequence share its cache. Tensor parallelism divides both evenly and adds
all-reduces, which nothing overlaps here. All this is a bound: launches, sampling and
imperfect kernels come on top, and only measuring tells them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from specjax.theory._check import FloatArray, Values, one, plain, real, whole
from specjax.theory._hardware import Hardware, Rate
from specjax.theory._model_shape import ModelShape


class PassTime(NamedTuple):
    """The parts of a pass, in seconds; each a float, or an array where asked for many.

    Attributes:
      weights_s: reading weights.
      activations_s: writing and reading activations.
      kv_s: reading the cache and writing the new rows.
      arithmetic_s: products with weights and attention, at the peak rate.
      link_s: all-reduces between devices.
      total_s: max(weights and activations, their arithmetic) + max(cache, attention's
        arithmetic) + link.
    """

    weights_s: Values
    activations_s: Values
    kv_s: Values
    arithmetic_s: Values
    link_s: Values
    total_s: Values


def pass_time(
    model: ModelShape,
    hardware: Hardware,
    *,
    width: ArrayLike = 1,
    batch: ArrayLike = 1,
    n_context: ArrayLike = 0,
    n_devices: int = 1,
    rate: Rate = "bf16",
) -> PassTime:
    """Computes the least time of one pass; of one decode step at width 1.

    Args:
      model: counts of the model.
      hardware: one device.
      width: rows a sequence, gamma + 1 in verification; whole, >= 1.
      batch: sequences; whole, >= 1.
      n_context: cached tokens a sequence that the pass attends; whole, >= 0. For a
        window or a bounded cache give its size.
      n_devices: of tensor parallelism, over which weights, cache and work divide
        evenly.
      rate: number format of the arithmetic.

    Returns:
      Seconds; arrays of the broadcast shape of width, batch and n_context.

    Raises:
      ValueError: an argument is outside its range, or the device's rate, or its link
        where n_devices > 1, is not known.

    References:
      Williams et al., 2009, "Roofline"; Chen et al., 2024, arXiv:2408.11049 (MagicDec:
      the cache's share in long contexts).
    """
    per = one("n_devices", whole("n_devices", n_devices, least=1, remedy=_DEVICES))
    rows_each = whole("width", width, least=1, remedy="It is gamma + 1.")
    sequences = whole("batch", batch, least=1, remedy="It counts sequences.")
    context = whole("n_context", n_context, remedy="It counts cached tokens.")
    rows_each, sequences, context = np.broadcast_arrays(rows_each, sequences, context)
    rows = rows_each * sequences

    byte_s = per * hardware.bandwidth_bytes_per_s
    flop_s = per * hardware.flops_per_s(rate)
    weights = np.asarray(model.read_weight_bytes(rows)) / byte_s
    activations = rows * model.activation_bytes_per_row / byte_s
    cached = sequences * (context + rows_each)
    kv = cached * model.kv_bytes_per_token / byte_s
    products = 2 * model.n_params * rows / flop_s
    # A row attends the cache, the rows of its pass before it, and itself.
    attention = rows * (context + (rows_each + 1) / 2) * model.attention_flops / flop_s
    link = _link(model, hardware, rows, per)
    total = np.maximum(weights + activations, products)
    total = total + np.maximum(kv, attention) + link
    parts = (weights, activations, kv, products + attention, link, total)
    return PassTime(*(plain(np.asarray(part)) for part in parts))


_DEVICES = "It counts devices that share each layer."


def _link(
    model: ModelShape, hardware: Hardware, rows: FloatArray, n_devices: float
) -> FloatArray:
    """Computes seconds of all-reduces: each device sends 2 (n - 1)/n of the payload."""
    if n_devices == 1:
        return np.zeros_like(rows)
    if hardware.link_bytes_per_s is None:
        raise ValueError(
            f"the link of {hardware.name} is not known, but n_devices={n_devices:g}; "
            "use dataclasses.replace(hardware, link_bytes_per_s=...)."
        )
    sent = 2 * (n_devices - 1) / n_devices * rows * model.reduced_bytes_per_row
    wait = model.n_reductions * hardware.link_latency_s
    return sent / hardware.link_bytes_per_s + wait


def passes_per_second_ceiling(
    read_bytes: ArrayLike, bandwidth_bytes_per_s: ArrayLike
) -> Values:
    """Computes the passes a second that reading the weights allows.

    Args:
      read_bytes: bytes a pass must read, weights (of a mixture, the active ones) and
        cache, > 0.
      bandwidth_bytes_per_s: of all devices together, > 0.

    Returns:
      Passes a second; times tokens per pass, the tokens a second of one sequence.

    Raises:
      ValueError: an argument is not positive.
    """
    remedy = "Give bytes, not gigabytes."
    size = real("read_bytes", read_bytes, least=0, open_least=True, remedy=remedy)
    speed = real(
        "bandwidth_bytes_per_s",
        bandwidth_bytes_per_s,
        least=0,
        open_least=True,
        remedy=remedy,
    )
    return plain(np.asarray(speed / size))
