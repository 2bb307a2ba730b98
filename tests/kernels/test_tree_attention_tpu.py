"""The TPU kernel of tree attention in interpret mode, against the definition."""

import dataclasses
import functools

import attention_checks as checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tree_attention import kernel_tpu, tiles_tpu

STATIC = ("scale", "window", "sinks", "soft_cap", "interpret")
compiled = jax.jit(kernel_tpu.tree_attention, static_argnames=STATIC)
PARAMS = pltpu.InterpretParams(uninitialized_memory="nan")
kernel = checks.bind(compiled, interpret=PARAMS)


def chain_kernel(*args, mask, offsets, **named):
    """Calls the kernel's form for chains, which has no mask."""
    del mask, offsets
    return kernel(*args, mask=None, offsets=None, **named)


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": "bfloat16", "width": 128, "group": 3},
        {"dtype": "float32", "soft_cap": 3.0},
        {"dtype": "bfloat16", "kv_dtype": "int8", "window": 40, "sinks": 3},
        {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn", "width": 128},
    ],
    ids=str,
)
def test_equals_the_definition(kind):
    """Trees at the start, over a block's edge, behind blocks, and at the end."""
    case = checks.make_case([0, 250, 503], 9, **kind)
    assert len(checks.check(kernel, case)) >= 6


def test_window_and_sinks_leave_blocks_out():
    """Blocks between sinks and window hold NaN for the whole cache here."""
    case = checks.make_case(
        [900, 1003], 5, slots=1024, window=100, sinks=300, dtype="bfloat16"
    )
    checks.check(kernel, case)
    spoilt = checks.poisoned(case)
    dead = slice(512, 768)
    spoilt = dataclasses.replace(
        spoilt,
        keys=spoilt.keys.at[:, :, dead].set(np.nan),
        values=spoilt.values.at[:, :, dead].set(np.nan),
    )
    out = checks.call(kernel, spoilt)
    np.testing.assert_array_equal(out, checks.call(kernel, checks.poisoned(case)))


def test_named_rows_of_the_cache():
    case = checks.make_case([30, 200], 3, rows=[2, 0], batch=3, dtype="bfloat16")
    checks.check(kernel, case)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_lengths_and_trees(data):
    """One shape, so that it is compiled once; lengths, trees and numbers vary."""
    length = data.draw(st.lists(st.integers(0, 512 - 9), min_size=2, max_size=2))
    shape = data.draw(st.sampled_from(["chain", "star", "random"]))
    seed = data.draw(st.integers(0, 2**16))
    case = checks.make_case(length, 9, shape=shape, seed=seed, width=128, group=3)
    assert "zeros" in checks.check(kernel, case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_a_chain_alone_has_the_same_bits(dtype):
    """Wide or narrow, with a mask or without, wherever in the pass and the batch."""
    case = checks.make_case([240, 7], 40, shape="chain", dtype=dtype)
    wide = checks.call(chain_kernel, checks.poisoned(case))
    np.testing.assert_array_equal(wide, checks.call(kernel, checks.poisoned(case)))
    for row, first, n_new in [(0, 0, 1), (0, 17, 1), (0, 39, 1), (1, 5, 1), (0, 10, 5)]:
        part = checks.poisoned(checks.only(case, row, first, n_new))
        part = checks.call(chain_kernel, part)
        np.testing.assert_array_equal(part[0], wide[row, first : first + n_new])


def test_wide_passes_take_several_steps(monkeypatch):
    """Words beyond the first, tiles in more than one step, heads apart."""
    monkeypatch.setattr(tiles_tpu, "_MOST_TILES", 2)
    monkeypatch.setattr(tiles_tpu, "_MOST_HEADS", 1)
    case = checks.make_case([200], 70, dtype="bfloat16")
    p = tiles_tpu.sized(tiles_tpu.pass_of(case.q, case.keys, True, False))
    assert p.grid == (1, 2, 3) and p.n_words == 3
    run = checks.bind(kernel_tpu.tree_attention, interpret=PARAMS)
    checks.check(run, case)


def test_without_races_in_the_tpu_interpreter():
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    case = checks.make_case([300, 3], 2, dtype="bfloat16", group=1)
    try:
        checks.check(checks.bind(compiled, interpret=params), case)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_what_it_refuses():
    s = jax.ShapeDtypeStruct
    q = s((2, 8, 8, 128), jnp.bfloat16)
    cache = functools.partial(s, (2, 8, 512, 128))
    supports = functools.partial(kernel_tpu.supports, q)
    scale = s((2, 8, 512), jnp.float32)
    assert supports(cache(jnp.bfloat16)) is None
    assert supports(cache(jnp.int8), key_scale=scale) is None
    assert "has scales" in supports(cache(jnp.bfloat16), key_scale=scale)
    assert "the cache is float16" in supports(cache(jnp.float16))
    assert "multiple of 256" in supports(s((2, 8, 384, 128), jnp.bfloat16))
    half = s((2, 8, 8, 128), jnp.float16)
    assert "queries are float16" in kernel_tpu.supports(half, cache(jnp.bfloat16))
    odd = s((2, 8, 8, 20), jnp.bfloat16), s((2, 8, 512, 20), jnp.bfloat16)
    assert "no multiple of 16" in kernel_tpu.supports(*odd)
    vast = s((1, 1, 1, 8192), jnp.float32), s((1, 1, 256, 8192), jnp.float32)
    assert "VMEM" in kernel_tpu.supports(*vast)
    tree = s((1, 300, 300), jnp.bool_)
    large = s((1, 300, 8, 128), jnp.bfloat16)
    assert "larger than 256" in kernel_tpu.supports(
        large, cache(jnp.bfloat16), mask=tree
    )
    with pytest.raises(ValueError, match="float16"):
        kernel_tpu.tree_attention(half, half, half, jnp.zeros(2), scale=1.0)
