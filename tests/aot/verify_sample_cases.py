"""Passes that ``verify_sample`` is compiled for: Llama-3, SmolLM2 and Gemma rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.ops.verify_sample import verify_sample
from specjax.sampling import Settings, UniformNoise, n_gumbels


class Drafts(NamedTuple):
    tokens: jax.ShapeDtypeStruct
    logprobs: jax.ShapeDtypeStruct | None
    n_valid: jax.ShapeDtypeStruct
    parents: None = None


_ON_GPU = (
    "llama3_rejection_law",
    "llama3_coupled",
    "llama3_greedy",
    "smollm2_coupled",
)


def cases(platform):
    """Returns name -> (function, arguments)."""
    kernel = f"pallas_{platform}"
    shapes = {
        "llama3_rejection_law": ("rejection", 16, 7, 128256, True, jnp.float32),
        "llama3_rejection_points": ("rejection", 8, 7, 128256, False, jnp.float32),
        "llama3_coupled": ("coupled", 8, 7, 128256, False, jnp.float32),
        "llama3_coupled_bf16": ("coupled", 8, 7, 128256, False, jnp.bfloat16),
        "llama3_greedy": ("greedy", 8, 7, 128256, False, jnp.float32),
        "llama3_one_row": ("rejection", 1, 0, 128256, False, jnp.float32),
        "smollm2_coupled": ("coupled", 1, 7, 49152, False, jnp.float32),
        "gemma_rejection_law": ("rejection", 8, 7, 262144, True, jnp.bfloat16),
        "gpt2_rejection_law": ("rejection", 2, 7, 50257, True, jnp.bfloat16),
    }
    if platform == "gpu":
        # Seconds each: the compiler unrolls what a thread has in registers.
        shapes = {name: shapes[name] for name in _ON_GPU}
    return {name: _case(kernel, *shape) for name, shape in shapes.items()}


def _case(kernel, rule, batch, n_drafts, vocab, law, dtype):
    s = jax.ShapeDtypeStruct
    f32, i32 = jnp.float32, jnp.int32
    drafts = Drafts(
        tokens=s((batch, n_drafts), i32),
        logprobs=s((batch, n_drafts, vocab), f32) if law else None,
        n_valid=s((batch,), i32),
    )
    settings = Settings(
        temperature=s((batch,), f32),
        top_k=s((batch,), i32),
        top_p=s((batch,), f32),
        min_p=s((batch,), f32),
        seed=s((batch,), jnp.uint32),
    )
    noise = None
    if rule == "coupled":
        noise = s((batch, n_drafts + 1, n_gumbels(vocab)), f32)
    elif rule == "rejection":
        noise = UniformNoise(s((batch, n_drafts), f32), s((batch,), f32))

    def function(logits, drafts, settings, noise):
        return verify_sample(
            logits, drafts, settings, noise, rule=rule, implementation=kernel
        )

    return function, (s((batch, n_drafts + 1, vocab), dtype), drafts, settings, noise)
