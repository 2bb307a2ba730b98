"""specjax: speculative decoding for JAX.

Three lines in a notebook::

    import specjax
    model = specjax.load("smollm2-135m-instruct")
    specjax.generate(model, "Why is the sky blue?", temperature=0.7, seed=0)
"""

from specjax import drafters, models, sampling, verify
from specjax.decode import (
    Completion,
    Controls,
    Engine,
    Event,
    Generation,
    Request,
    Stats,
    enable_compilation_cache,
    encode_prompt,
    generate,
    stream,
)
from specjax.drafters import DraftContext, Drafter, DrafterSpec, Proposal
from specjax.models import (
    DecoderConfig,
    Features,
    RopeConfig,
    Target,
    TargetSpec,
    decoder_target,
    init_params,
)
from specjax.sampling import Settings, warp
from specjax.verify import Verdict, VerifyRule
from specjax.weights import KNOWN_MODELS, Model, load, save_orbax

__version__ = "0.1.0"

__all__ = [
    "KNOWN_MODELS",
    "Completion",
    "Controls",
    "DecoderConfig",
    "DraftContext",
    "Drafter",
    "DrafterSpec",
    "Engine",
    "Event",
    "Features",
    "Generation",
    "Model",
    "Proposal",
    "Request",
    "RopeConfig",
    "Settings",
    "Stats",
    "Target",
    "TargetSpec",
    "Verdict",
    "VerifyRule",
    "decoder_target",
    "drafters",
    "enable_compilation_cache",
    "encode_prompt",
    "generate",
    "init_params",
    "load",
    "models",
    "sampling",
    "save_orbax",
    "stream",
    "verify",
    "warp",
]
