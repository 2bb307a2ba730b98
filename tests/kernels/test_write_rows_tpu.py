"""The TPU kernel of ``write_rows`` in interpret mode, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from test_write_rows_checks import (
    BATCH,
    DTYPES,
    NEW,
    SLOTS,
    STARTS,
    check,
    check_has_teeth,
    make,
)

from kernels_pallas.write_rows import kernel_tpu


@functools.partial(jax.jit, static_argnames=("races",))
def run(keys, values, new_keys, new_values, start, rows=None, races=False):
    params = pltpu.InterpretParams(detect_races=races, uninitialized_memory="nan")
    return kernel_tpu.write_rows(
        keys, values, new_keys, new_values, start, rows, interpret=params
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_definition(dtype):
    arrays, start = make(0, dtype), jnp.asarray(STARTS, jnp.int32)
    check(run(*arrays, start), arrays, start)


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32 - 1))
def test_equals_the_definition_anywhere(seed):
    rng = np.random.default_rng(seed)
    arrays = make(seed, DTYPES[seed % 2 * 2])
    start = jnp.asarray(rng.integers(0, SLOTS - NEW + 1, BATCH), jnp.int32)
    check(run(*arrays, start), arrays, start)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize(("slots", "n_new"), [(32, 32), (64, 40), (64, 1)])
def test_long_and_short_passes(dtype, slots, n_new):
    """A window may be the whole array; a pass may be one row."""
    arrays = make(1, dtype, n_new=n_new, n_rows=2, batch=2, slots=slots)
    for start in ([slots - n_new, 0], [(slots - n_new) // 2, (slots - n_new) // 3]):
        start = jnp.asarray(start, jnp.int32)
        check(run(*arrays, start), arrays, start)


@pytest.mark.parametrize("row", [0, 2])
def test_one_batch_row(row):
    arrays = make(2, jnp.bfloat16, n_rows=1)
    start = jnp.asarray([37], jnp.int32)
    found = run(*arrays, start, jnp.asarray([row], jnp.int32))
    check(found, arrays, start, jnp.asarray(row))
    with pytest.raises(AssertionError):
        check(found, arrays, start, jnp.asarray(row + 1))


def test_rows_are_cast_as_the_cache_casts_them():
    keys, values, *_ = make(3, jnp.bfloat16)
    rng = np.random.default_rng(3)
    shape = (BATCH, NEW, keys.shape[1], keys.shape[3])
    new = [jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)]
    start = jnp.asarray(STARTS, jnp.int32)
    check(run(keys, values, *new, start), (keys, values, *new), start)


def test_rows_in_several_steps(monkeypatch):
    """Of six rows three fit in a step."""
    monkeypatch.setattr(kernel_tpu, "_VMEM_BYTES", 800_000)
    arrays = make(4, jnp.float32, n_new=12)
    start = jnp.asarray(STARTS, jnp.int32) - 1 + (np.asarray(STARTS) == 0)
    window = kernel_tpu._window(arrays[0], 12)
    assert 3 <= 800_000 // kernel_tpu._step_bytes(window) < 6
    check(run(*arrays, start), arrays, start)


def test_the_comparison_has_teeth():
    check_has_teeth(run)


def test_without_races_in_the_tpu_interpreter():
    arrays = make(5, jnp.bfloat16, n_rows=3, batch=3, slots=64)
    start = jnp.asarray([0, 13, 50], jnp.int32)
    try:
        check(run(*arrays, start, races=True), arrays, start)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_what_it_refuses():
    supports = kernel_tpu.supports
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
    assert supports(shape(8, 8, 8192, 128), n_new=256) is None
    assert "multiple of 16" in supports(shape(1, 1, 40, 8), n_new=8)
    assert "no 8, 16 or 32" in supports(shape(1, 1, 64, 8, dtype=np.float64), n_new=8)
    assert "VMEM" in supports(shape(1, 32, 8192, 256), n_new=1024)
