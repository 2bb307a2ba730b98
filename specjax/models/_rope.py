"""Rotary position embedding with every scaling type in use.

Every type here makes the rotation a function of the token's own position, which
speculation needs: a position must be rotated alike whether it is reached in a
draft block, token by token, or in prefill. ``dynamic`` and ``longrope`` are
defined by the length of the sequence so far, which for the token at position p is
p + 1; that is what token-by-token decoding computes.

References: Su et al., arXiv:2104.09864; Peng et al. (YaRN), arXiv:2309.00071;
Ding et al. (LongRoPE), arXiv:2402.13753.
"""

import math

import jax.numpy as jnp
import numpy as np

from specjax.models._config import RopeConfig
from specjax.typing import Array, Float, Int


def rope_tables(
    config: RopeConfig, head_width: int, positions: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows M2"], Float[Array, "*rows M2"]]:
    """Computes cosines and sines for positions.

    Args:
      config: the embedding.
      head_width: width of a head M.
      positions: absolute positions.

    Returns:
      cos and sin of the angles of the M/2 pairs, float32, scaled by the
      attention factor where the type has one.
    """
    positions = positions[..., None]
    inverse = _inverse_frequencies(config, head_width, positions)
    # Written-out ranks: the frequencies may be one set for all or one a position.
    inverse = inverse.reshape((1,) * (positions.ndim - inverse.ndim) + inverse.shape)
    angles = positions.astype(jnp.float32) * inverse
    factor = jnp.float32(attention_factor(config))
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "*rows N M"],
    cos: Float[Array, "*rows M2"],
    sin: Float[Array, "*rows M2"],
) -> Float[Array, "*rows N M"]:
    """Rotates the pairs (i, i + M/2) of each head, the "half" convention.

    Args:
      x: queries or keys, float32.
      cos: from ``rope_tables``.
      sin: from ``rope_tables``.

    Returns:
      The rotated heads.
    """
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def attention_factor(config: RopeConfig) -> float:
    """Returns the factor on cosines and sines (1 for most types)."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "yarn":
        if config.mscale and config.mscale_all_dim:
            return _yarn_scale(config.factor, config.mscale) / _yarn_scale(
                config.factor, config.mscale_all_dim
            )
        return _yarn_scale(config.factor, 1.0)
    if config.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_context))


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _inverse_frequencies(
    config: RopeConfig, head_width: int, positions: Int[Array, "*rows 1"]
) -> Array:
    """Returns inverse frequencies, [M/2] or one set a position [*rows, M/2]."""
    exponent = np.arange(0, head_width, 2, dtype=np.float64) / head_width
    base = config.theta**-exponent
    kind = config.kind
    if kind == "dynamic":
        return _dynamic(config, head_width, exponent, positions)
    if kind == "longrope":
        short = base / _divisors(config.short_factor, head_width, "short_factor")
        long = base / _divisors(config.long_factor, head_width, "long_factor")
        beyond = positions + 1 > config.original_context
        return jnp.where(beyond, jnp.float32(long), jnp.float32(short))
    if kind == "linear":
        base = base / config.factor
    elif kind == "llama3":
        base = _llama3(config, base)
    elif kind == "yarn":
        base = _yarn(config, head_width, base)
    elif kind == "factors":
        base = base / _divisors(config.factors, head_width, "factors")
    return jnp.asarray(base, jnp.float32)


def _divisors(values: tuple[float, ...], head_width: int, name: str) -> np.ndarray:
    if len(values) != head_width // 2:
        raise ValueError(
            f"RoPE {name} has {len(values)} numbers, a head of width {head_width} "
            f"needs {head_width // 2}."
        )
    return np.asarray(values, np.float64)


def _dynamic(
    config: RopeConfig, head_width: int, exponent: np.ndarray, positions: Array
) -> Array:
    """NTK scaling whose base grows with the length reached, position + 1."""
    length = jnp.maximum(positions + 1, config.original_context).astype(jnp.float32)
    growth = config.factor * length / config.original_context - (config.factor - 1)
    theta = config.theta * growth ** (head_width / (head_width - 2))
    exponent = exponent.reshape((1,) * (positions.ndim - 1) + exponent.shape)
    return theta ** -jnp.asarray(exponent, jnp.float32)


def _llama3(config: RopeConfig, base: np.ndarray) -> np.ndarray:
    wavelength = 2 * math.pi / base
    low = config.original_context / config.low_freq_factor
    high = config.original_context / config.high_freq_factor
    smooth = (config.original_context / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    blended = (1 - smooth) * base / config.factor + smooth * base
    scaled = np.where(wavelength > low, base / config.factor, blended)
    return np.where(wavelength < high, base, scaled)


def _yarn(config: RopeConfig, head_width: int, base: np.ndarray) -> np.ndarray:
    def dimension(rotations: float) -> float:
        context = config.original_context / (rotations * 2 * math.pi)
        return head_width * math.log(context) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_width - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_width // 2, dtype=np.float64) - low) / (high - low)
    keep = 1 - np.clip(ramp, 0, 1)
    return base / config.factor * (1 - keep) + base * keep
