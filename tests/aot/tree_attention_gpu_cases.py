"""Passes that the GPU kernel of tree attention is compiled for."""

import jax
import jax.numpy as jnp

LLAMA = {"n_heads": 32, "n_kv": 8, "width": 128}
SMOLLM = {"n_heads": 9, "n_kv": 3, "width": 64}


def cases(platform):
    """Returns name -> (function, arguments)."""
    if platform != "gpu":
        return {}
    return {
        "llama3_decode": _case(1, **LLAMA),
        "llama3_chain_8": _case(8, **LLAMA),
        "llama3_tree_64": _case(64, tree=True, **LLAMA),
        "llama3_tree_256": _case(256, tree=True, **LLAMA),
        "llama3_window_cap": _case(
            8, tree=True, window=4096, sinks=4, soft_cap=50.0, **LLAMA
        ),
        "llama3_int8": _case(8, kv_dtype=jnp.int8, **LLAMA),
        "llama3_fp8": _case(8, kv_dtype=jnp.float8_e4m3fn, tree=True, **LLAMA),
        "smollm2_decode": _case(1, batch=1, slots=2048, **SMOLLM),
        "smollm2_tree_64": _case(64, batch=1, slots=2048, tree=True, **SMOLLM),
    }


def _case(
    n_new,
    *,
    n_heads,
    n_kv,
    width,
    batch=8,
    slots=8192,
    kv_dtype=jnp.bfloat16,
    tree=False,
    **kind,
):
    s = jax.ShapeDtypeStruct
    cache = s((batch, n_kv, slots, width), kv_dtype)
    arguments = {
        "q": s((batch, n_new, n_heads, width), jnp.bfloat16),
        "keys": cache,
        "values": cache,
        "length": s((batch,), jnp.int32),
    }
    if tree:
        arguments["mask"] = s((batch, n_new, n_new), jnp.bool_)
        arguments["offsets"] = s((batch, n_new), jnp.int32)
    if kv_dtype != jnp.bfloat16:
        scales = s((batch, n_kv, slots), jnp.float32)
        arguments |= {"key_scale": scales, "value_scale": scales}

    def function(arguments):
        # Of the device that is compiled for: there is none here to ask.
        from kernels_pallas.tree_attention import kernel_gpu

        device = jax.sharding.get_abstract_mesh().abstract_device
        kinds = {"H200": "sm_90", "GB10": "sm_120"}
        arch = next(v for k, v in kinds.items() if k in device.device_kind)
        return kernel_gpu.tree_attention(
            **arguments, scale=width**-0.5, arch=arch, **kind
        )

    return function, (arguments,)
