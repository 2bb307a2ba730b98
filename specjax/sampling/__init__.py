"""From logits to laws, and from laws and explicit noise to tokens."""

from specjax.sampling._controls import (
    UNCONSTRAINED,
    ControlSpec,
    ControlState,
    MaskState,
    Penalties,
    advance_controls,
    apply_controls,
    init_controls,
)
from specjax.sampling._draw import (
    UniformNoise,
    draft_noise,
    draw,
    gumbel_argmax,
    gumbel_margin,
    gumbel_noise,
    n_gumbels,
    uniform_noise,
)
from specjax.sampling._settings import Settings, check_sampling, check_whole
from specjax.sampling._warp import warp

__all__ = [
    "UNCONSTRAINED",
    "ControlSpec",
    "ControlState",
    "MaskState",
    "Penalties",
    "Settings",
    "UniformNoise",
    "advance_controls",
    "apply_controls",
    "check_sampling",
    "check_whole",
    "draft_noise",
    "draw",
    "gumbel_argmax",
    "gumbel_margin",
    "gumbel_noise",
    "init_controls",
    "n_gumbels",
    "uniform_noise",
    "warp",
]
