"""Caches that ``gather_path`` is compiled for: whole models, all layers in one call."""

import jax
import jax.numpy as jnp

from specjax.ops.gather_path import gather_path

LLAMA3 = {"layers": 32, "heads": 8, "width": 128, "batch": 8, "slots": 8192}
SMOLLM2 = {"layers": 30, "heads": 3, "width": 64, "batch": 4, "slots": 2048}


def cases(platform):
    """Returns name -> (function, arguments)."""
    kernel = f"pallas_{platform}"
    found = {
        "llama3_bf16_tree64": _case(kernel, **LLAMA3, nodes=63, depth=8),
        "llama3_bf16_tree7": _case(kernel, **LLAMA3, nodes=7, depth=4),
        "llama3_int8_tree64": _case(kernel, **LLAMA3, nodes=63, dtype=jnp.int8),
        "llama3_fp8_tree64": _case(kernel, **LLAMA3, nodes=63, dtype=jnp.float8_e4m3fn),
        "llama3_bf16_tree255": _case(
            kernel, **{**LLAMA3, "layers": 4}, nodes=255, depth=16
        ),
    }
    if platform == "gpu":  # narrow heads are left to XLA on TPUs
        found["smollm2_f32_tree64"] = _case(
            kernel, **SMOLLM2, nodes=63, dtype=jnp.float32
        )
        found["smollm2_bf16_tree64"] = _case(kernel, **SMOLLM2, nodes=63)
    found["llama3_int8_scales"] = _case(
        kernel, **{**LLAMA3, "layers": 4}, nodes=63, dtype=jnp.int8, scales=True
    )
    return found


def _case(
    kernel,
    *,
    layers,
    heads,
    width,
    batch,
    slots,
    nodes,
    depth=8,
    dtype=jnp.bfloat16,
    scales=False,
):
    s = jax.ShapeDtypeStruct
    shape = (batch, heads, slots, width)
    layer = [s(shape, dtype), s(shape, dtype)]
    if scales:
        layer += [s(shape[:3], jnp.float32), s(shape[:3], jnp.float32)]
    caches = [layer] * layers

    def function(caches, start, path):
        return gather_path(caches, start, path, nodes, implementation=kernel)

    function.donated = (0,)
    i32 = jnp.int32
    return function, (caches, s((batch,), i32), s((batch, depth), i32))
