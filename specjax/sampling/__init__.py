"""From logits to laws, and from laws and explicit noise to tokens."""

from specjax.sampling._draw import UniformNoise, draw, gumbel_noise, uniform_noise
from specjax.sampling._settings import Settings, check_sampling, check_whole
from specjax.sampling._warp import warp

__all__ = [
    "Settings",
    "UniformNoise",
    "check_sampling",
    "check_whole",
    "draw",
    "gumbel_noise",
    "uniform_noise",
    "warp",
]
