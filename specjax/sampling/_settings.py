"""Sampling settings, one value a row."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.typing import Array, Float, Int, UInt

_LEAST_TEMPERATURE = 1e-4
_MOST_TEMPERATURE = 1e4


class Settings(NamedTuple):
    """How each batch row samples. All traced: changing them compiles nothing.

    Attributes:
      temperature: 0 is greedy, exactly.
      top_k: keep the k most probable tokens; 0 is off.
      top_p: keep the smallest set of most probable tokens whose mass reaches
        top_p; 1 is off.
      min_p: keep tokens at least min_p times as probable as the most probable
        one; 0 is off.
      seed: of the row's random numbers.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt[Array, " B"]

    @classmethod
    def full(
        cls,
        batch: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> "Settings":
        """Makes the same settings for every row, after checking them."""
        check_sampling(temperature, top_k, top_p, min_p, seed)
        return cls(
            temperature=jnp.full((batch,), temperature, jnp.float32),
            top_k=jnp.full((batch,), top_k, jnp.int32),
            top_p=jnp.full((batch,), top_p, jnp.float32),
            min_p=jnp.full((batch,), min_p, jnp.float32),
            seed=jnp.full((batch,), seed, jnp.uint32),
        )

    @classmethod
    def of_row(
        cls, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
    ) -> "Settings":
        """Makes one row's settings as scalars on the host, without checks."""
        row: Any = (
            np.float32(temperature),
            np.int32(top_k),
            np.float32(top_p),
            np.float32(min_p),
            np.uint32(seed),
        )
        return cls(*row)


def check_sampling(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Checks sampling settings.

    Raises:
      ValueError: a setting is outside its range; the message names it.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"temperature={temperature} must be a finite number >= 0 (0 is greedy)."
        )
    if temperature > 0 and not _LEAST_TEMPERATURE <= temperature <= _MOST_TEMPERATURE:
        raise ValueError(
            f"temperature={temperature} must be 0 or in [{_LEAST_TEMPERATURE}, "
            f"{_MOST_TEMPERATURE}]: beyond that, scaled logits leave float32's range."
        )
    check_whole("top_k", top_k, 0, 2**31, "0 is off")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} must be in (0, 1] (1 is off).")
    if not 0 <= min_p < 1:
        raise ValueError(f"min_p={min_p} must be in [0, 1) (0 is off).")
    check_whole("seed", seed, 0, 2**32, "it keys the random numbers")


def check_whole(name: str, value: float, least: int, end: int, note: str) -> None:
    """Checks a whole-number setting.

    Args:
      name: of the setting, for the message.
      value: what was given.
      least: smallest allowed value.
      end: one more than the largest.
      note: what the setting does, for the message.

    Raises:
      ValueError: the value is no whole number in [least, end).
    """
    whole = not isinstance(value, bool) and math.isfinite(value) and value == int(value)
    if not whole or not least <= value < end:
        raise ValueError(
            f"{name}={value} must be a whole number in [{least}, {end}) ({note})."
        )
