"""Measuring the device at hand."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.theory._check import one, whole
from specjax.theory._hardware import Hardware

_FIELDS = {"bfloat16": "bf16_flops_per_s", "float32": "fp32_flops_per_s"}


def measure_hardware(
    device: Any | None = None,
    *,
    copy_bytes: int = 256 * 2**20,
    matmul_size: int = 4096,
    repeats: int = 5,
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
) -> Hardware:
    """Measures copy bandwidth and the rate of square products, as medians.

    What it is: an elementwise pass over ``copy_bytes`` of float32 (read and written,
    counted as both) and products of two square matrices at JAX's default precision
    (on TPU and GPU float32 may then run at reduced precision), each run once
    unmeasured and then ``repeats`` times. Dispatching is inside the times. What it
    is not: a bound. Reading alone can be faster than copying; on CPUs a write may
    read its line first, which is not counted; caches flatter a small ``copy_bytes``;
    and other work on the machine slows it down. Links are not measured.

    Args:
      device: a ``jax.Device``; None is JAX's default.
      copy_bytes: bytes to read (as many are written); several times the last cache.
      matmul_size: rows and columns of the matrices.
      repeats: measured runs of each.
      dtypes: of the products, among "bfloat16" and "float32".

    Returns:
      A device named after its kind; ``certainty`` is "measured". ``memory_bytes`` is
      0 where JAX does not tell.

    Raises:
      ValueError: a size is below 1, or a dtype is another.
    """
    _check(dtypes, copy_bytes=copy_bytes, matmul_size=matmul_size, repeats=repeats)
    chip: Any = device or jax.devices()[0]

    n = max(copy_bytes // 4, 1)
    source = jax.device_put(jnp.ones(n, jnp.float32), chip)
    copy_s = _median_s(lambda: jnp.negative(source), repeats)
    rates = {}
    for dtype in dtypes:
        square = jnp.ones((matmul_size, matmul_size), dtype)
        square = jax.device_put(square, chip)
        seconds = _median_s(lambda x=square: jnp.matmul(x, x), repeats)
        rates[_FIELDS[dtype]] = 2 * matmul_size**3 / seconds
    stats = chip.memory_stats() or {}
    return Hardware(
        name=chip.device_kind.lower().replace(" ", "-"),
        memory_bytes=float(stats.get("bytes_limit", 0)),
        bandwidth_bytes_per_s=8 * n / copy_s,
        source=f"measured here with JAX {jax.__version__}: medians of {repeats}, "
        f"{4 * n} bytes copied, products of {matmul_size} x {matmul_size}",
        certainty="measured",
        note="Achieved, not peak. Links were not measured.",
        **rates,
    )


def _check(dtypes: tuple[str, ...], **sizes: int) -> None:
    for name, value in sizes.items():
        one(name, whole(name, value, least=1, remedy="It is a size."))
    for dtype in dtypes:
        if dtype not in _FIELDS:
            raise ValueError(f"dtype {dtype!r} is not among {', '.join(_FIELDS)}.")


def _median_s(run: Callable[[], jax.Array], repeats: int) -> float:
    """Gives the median seconds of a run, the first left out (it compiles)."""
    run().block_until_ready()
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        run().block_until_ready()
        times_s.append(time.perf_counter() - start_s)
    return float(np.median(times_s))
