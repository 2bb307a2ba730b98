"""Passes that the TPU kernel of ``tree_attention`` is compiled for."""

import jax
import jax.numpy as jnp

from specjax.ops.attention import cached_attention
from specjax.trees import PassLayout

LLAMA3 = {"heads": 32, "kv": 8, "width": 128, "batch": 8, "slots": 8192}
SMOLLM2 = {"heads": 9, "kv": 3, "width": 64, "batch": 4, "slots": 2048}
GEMMA2 = {"heads": 16, "kv": 8, "width": 256, "batch": 4, "slots": 8192}
BF16, F32 = jnp.bfloat16, jnp.float32
INT8, FP8 = jnp.int8, jnp.float8_e4m3fn


def cases(platform):
    """Returns name -> (function, arguments)."""
    return _tpu() if platform == "tpu" else {}


def _tpu():
    window = {"window": 1024, "sinks": 4}
    return {
        "llama3_bf16_t1": _case(**LLAMA3, n_new=1),
        "llama3_bf16_t8": _case(**LLAMA3, n_new=8),
        "llama3_bf16_tree8": _case(**LLAMA3, n_new=8, tree=True),
        "llama3_bf16_tree64": _case(**LLAMA3, n_new=64, tree=True),
        "llama3_bf16_tree256": _case(**LLAMA3, n_new=256, tree=True),
        "llama3_bf16_prefill256": _case(**LLAMA3, n_new=256, prefill=True),
        "llama3_bf16_tree8_window": _case(**LLAMA3, n_new=8, tree=True, **window),
        "llama3_f32_tree8": _case(**LLAMA3, n_new=8, tree=True, dtype=F32),
        "llama3_int8_tree8": _case(**LLAMA3, n_new=8, tree=True, kv_dtype=INT8),
        "llama3_fp8_tree8": _case(**LLAMA3, n_new=8, tree=True, kv_dtype=FP8),
        "gemma2_bf16_tree8": _case(**GEMMA2, n_new=8, tree=True, soft_cap=50.0),
        "smollm2_bf16_t5": _case(**SMOLLM2, n_new=5),
        "smollm2_bf16_tree64": _case(**SMOLLM2, n_new=64, tree=True),
        "smollm2_int8_t5": _case(**SMOLLM2, n_new=5, kv_dtype=INT8),
    }


def _case(
    *,
    heads,
    kv,
    width,
    batch,
    slots,
    n_new,
    dtype=BF16,
    kv_dtype=None,
    tree=False,
    prefill=False,
    **kind,
):
    s = jax.ShapeDtypeStruct
    kv_dtype = kv_dtype or dtype
    n_rows = 1 if prefill else batch
    cache = s((batch, kv, slots, width), kv_dtype)
    arrays = {}
    if tree:
        mask = s((n_rows, n_new, n_new), jnp.bool_)
        arrays["layout"] = PassLayout(mask, s((n_rows, n_new), jnp.int32))
    if prefill:
        arrays["row"] = s((), jnp.int32)
    if kv_dtype in (INT8, FP8):
        arrays |= dict.fromkeys(("key_scale", "value_scale"), s(cache.shape[:3], F32))

    def function(q, keys, values, length, arrays):
        return cached_attention(
            q,
            keys,
            values,
            length,
            scale=width**-0.5,
            implementation="pallas_tpu",
            **arrays,
            **kind,
        )

    q, length = s((n_rows, n_new, heads, width), dtype), s((n_rows,), jnp.int32)
    return function, (q, cache, cache, length, arrays)
