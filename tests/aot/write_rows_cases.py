"""Passes that ``write_rows`` is compiled for: one layer of Llama-3 and of SmolLM2."""

import jax
import jax.numpy as jnp

from specjax.ops.write_rows import write_rows

LLAMA3 = {"heads": 8, "width": 128, "batch": 8, "slots": 8192}
SMOLLM2 = {"heads": 3, "width": 64, "batch": 4, "slots": 2048}
BF16, F32 = jnp.bfloat16, jnp.float32


def cases(platform):
    """Returns name -> (function, arguments)."""
    kernel = f"pallas_{platform}"
    found = {
        f"llama3_bf16_t{n}": _case(kernel, **LLAMA3, n_new=n) for n in (1, 8, 64, 256)
    }
    found |= {
        "llama3_f32_t8": _case(kernel, **LLAMA3, n_new=8, dtype=F32),
        "llama3_int8_t8": _case(kernel, **LLAMA3, n_new=8, dtype=jnp.int8),
        "llama3_fp8_t8": _case(kernel, **LLAMA3, n_new=8, dtype=jnp.float8_e4m3fn),
        "llama3_bf16_prefill256": _case(kernel, **LLAMA3, n_new=256, prefill=True),
    }
    if platform == "gpu":  # narrow heads are left to XLA on TPUs
        found["smollm2_bf16_t5"] = _case(kernel, **SMOLLM2, n_new=5)
        found["smollm2_f32_t64"] = _case(kernel, **SMOLLM2, n_new=64, dtype=F32)
    return found


def _case(kernel, *, heads, width, batch, slots, n_new, dtype=BF16, prefill=False):
    s = jax.ShapeDtypeStruct
    cache = s((batch, heads, slots, width), dtype)
    n_rows = 1 if prefill else batch
    # As the model makes them; int8 rows come quantised.
    made = dtype if dtype == jnp.int8 else BF16
    new = s((n_rows, n_new, heads, width), made)
    start = s((n_rows,), jnp.int32)
    row = (s((), jnp.int32),) if prefill else ()

    def function(keys, values, new_keys, new_values, start, *row):
        return write_rows(
            keys, values, new_keys, new_values, start, *row, implementation=kernel
        )

    function.donated = (0, 1)
    return function, (cache, cache, new, new, start, *row)
