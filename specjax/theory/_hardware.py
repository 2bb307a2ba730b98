"""What a device can do, and how one knows."""

import dataclasses
from typing import Literal, get_args

from specjax.theory._check import real

Certainty = Literal["confirmed", "reported", "recalled", "measured"]
Rate = Literal["fp32", "bf16", "fp8", "int8", "fp4"]

_REMEDY = "Take it from the device's data sheet, or measure it."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device: peak rates as published, measured ones beside them where known.

    A device of one's own is ``Hardware(name=..., memory_bytes=...,
    bandwidth_bytes_per_s=..., source=..., certainty="measured", ...)``, or
    ``measure_hardware()``.

    Attributes:
      name: what ``get_hardware`` finds it by.
      memory_bytes: of the device, 0 where not known.
      bandwidth_bytes_per_s: of reading device memory.
      source: where the numbers come from.
      certainty: how sure they are: ``confirmed`` in the maker's documentation,
        ``reported`` by others, ``recalled`` without a source, or ``measured``.
        ``note`` names exceptions.
      fp32_flops_per_s: of dense products, a multiply-add counting two; None where
        not known. Likewise the following.
      bf16_flops_per_s: bfloat16 (and float16).
      fp8_flops_per_s: 8-bit floating point.
      int8_flops_per_s: 8-bit integer operations.
      fp4_flops_per_s: 4-bit floating point.
      link_bytes_per_s: what a device sends to its peers with all its links busy, in
        one direction (half of a bidirectional figure); None where not known.
      link_latency_s: of one all-reduce of nothing; 0 where not known, which favours
        tensor parallelism.
      measured_bandwidth_bytes_per_s: what a copy was seen to reach, or None.
      measured_bf16_flops_per_s: what products were seen to reach, or None.
      note: exceptions and doubts.
    """

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    source: str
    certainty: Certainty
    fp32_flops_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    int8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    link_bytes_per_s: float | None = None
    link_latency_s: float = 0.0
    measured_bandwidth_bytes_per_s: float | None = None
    measured_bf16_flops_per_s: float | None = None
    note: str = ""

    def __post_init__(self):
        for name in ("memory_bytes", "link_latency_s"):
            real(name, getattr(self, name), least=0, remedy=_REMEDY)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_per_s") and value is not None:
                real(field.name, value, least=0, open_least=True, remedy=_REMEDY)
        if self.certainty not in get_args(Certainty):
            raise ValueError(
                f"certainty={self.certainty!r} is unknown; use one of "
                f"{', '.join(get_args(Certainty))}."
            )
        if not self.name or not self.source:
            raise ValueError(
                f"name={self.name!r} and source={self.source!r} must not be empty; "
                "say what the device is and where its numbers come from."
            )

    def flops_per_s(self, rate: Rate = "bf16") -> float:
        """Gives the peak rate of dense products in a number format, FLOP/s.

        Raises:
          ValueError: the rate is not known.
        """
        if rate not in get_args(Rate):
            raise ValueError(
                f"rate={rate!r} is unknown; use one of {', '.join(get_args(Rate))}."
            )
        value = getattr(self, f"{rate}_flops_per_s")
        if value is None:
            raise ValueError(
                f"the {rate} rate of {self.name} is not known; measure it and use "
                f"dataclasses.replace(hardware, {rate}_flops_per_s=...)."
            )
        return value

    def as_measured(self) -> "Hardware":
        """Puts measured bandwidth and bf16 rate, where known, in the peaks' place."""
        return dataclasses.replace(
            self,
            bandwidth_bytes_per_s=self.measured_bandwidth_bytes_per_s
            or self.bandwidth_bytes_per_s,
            bf16_flops_per_s=self.measured_bf16_flops_per_s or self.bf16_flops_per_s,
        )


def ridge_point(hardware: Hardware, rate: Rate = "bf16") -> float:
    """Computes the FLOP a byte at which arithmetic takes as long as reading.

    Args:
      hardware: the device.
      rate: number format of the products.

    Returns:
      FLOP per byte; work of lower intensity is bound by memory.

    Raises:
      ValueError: the device's rate is not known.

    References:
      Williams et al., 2009, "Roofline".
    """
    return hardware.flops_per_s(rate) / hardware.bandwidth_bytes_per_s


def free_rows(
    hardware: Hardware, weight_bytes_per_param: float, rate: Rate = "bf16"
) -> float:
    """Computes how many rows a pass may have before products outlast reading weights.

    A dense product does 2 FLOP a row for each parameter read, so rows = ridge point *
    bytes a parameter / 2, over the whole batch: batch * (gamma + 1). Beyond it a
    verified row costs as much as a plain one, and speculation soon loses.

    Args:
      hardware: the device.
      weight_bytes_per_param: 2 for bfloat16, 0.5 for 4 bits and so on, > 0.
      rate: number format of the products.

    Returns:
      Rows, not rounded.

    Raises:
      ValueError: the device's rate is not known, or the bytes are not positive.
    """
    remedy = "It is 2 for bfloat16, 1 for 8 bits, 0.5 for 4 bits."
    real(
        "weight_bytes_per_param",
        weight_bytes_per_param,
        least=0,
        open_least=True,
        remedy=remedy,
    )
    return ridge_point(hardware, rate) * weight_bytes_per_param / 2
