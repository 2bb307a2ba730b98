"""The TPU kernel of ``gather_path`` in interpret mode, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from test_gather_path_checks import (
    DEPTH,
    DTYPES,
    NODES,
    SLOTS,
    STARTS,
    bits,
    check,
    check_has_teeth,
    make_caches,
    make_paths,
)

from kernels_pallas.gather_path import kernel_tpu


@functools.partial(jax.jit, static_argnames=("nodes", "races"))
def run(caches, start, path, nodes=NODES, races=False):
    params = pltpu.InterpretParams(detect_races=races, uninitialized_memory="nan")
    return kernel_tpu.gather_path(caches, start, path, nodes, interpret=params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_definition(dtype):
    caches = make_caches(0, dtype, scales=True)
    start = jnp.asarray(STARTS, jnp.int32)
    for seed in range(2):
        path = make_paths(seed)
        check(run(caches, start, path), caches, start, path)


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32 - 1))
def test_equals_the_definition_anywhere(seed):
    rng = np.random.default_rng(seed)
    dtype = DTYPES[seed % 2 * 2]
    caches = make_caches(seed, dtype, layers=1)
    start = jnp.asarray(rng.integers(0, SLOTS - NODES + 1, len(STARTS)), jnp.int32)
    path = make_paths(seed)
    check(run(caches, start, path), caches, start, path)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize(
    ("slots", "nodes", "depth"), [(32, 32, 32), (64, 40, 3), (128, 1, 1)]
)
def test_large_and_small_trees(dtype, slots, nodes, depth):
    """A window may be the whole array; a tree may be one node."""
    caches = make_caches(3, dtype, layers=3, shape=(2, 1, slots, 8))
    start = jnp.asarray([slots - nodes, (slots - nodes) // 2], jnp.int32)
    path = make_paths(3, batch=2, nodes=nodes, depth=depth)
    found = run(caches, start, path, nodes=nodes)
    check(found, caches, start, path)


def test_what_is_not_on_the_path_changes_nothing():
    """Other bits in all slots that are not kept leave the kept ones alone."""
    start, path = jnp.asarray(STARTS, jnp.int32), make_paths(4)
    caches, other = make_caches(4, jnp.bfloat16), make_caches(5, jnp.bfloat16)
    kept = np.zeros((len(STARTS), SLOTS), bool)
    ends = np.zeros_like(kept)
    for row in range(len(STARTS)):
        nodes = np.asarray(path[row])
        n = int((nodes >= 0).sum())
        kept[row, int(start[row]) + nodes[:n]] = True
        ends[row, int(start[row]) : int(start[row]) + n] = True
    mixed = [
        jnp.where(kept[:, None, :, None], x, y)
        for x, y in zip(caches, other, strict=True)
    ]
    for x, y in zip(run(caches, start, path), run(mixed, start, path), strict=True):
        x, y = (np.moveaxis(bits(z), 2, 1)[ends] for z in (x, y))
        np.testing.assert_array_equal(x, y)


def test_the_comparison_has_teeth():
    check_has_teeth(run)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_without_races_in_the_tpu_interpreter(dtype):
    """More arrays than buffers, so that each buffer is used again."""
    caches = make_caches(6, dtype, layers=3, scales=True, shape=(2, 1, 128, 8))
    start = jnp.asarray([5, 40], jnp.int32)
    path = make_paths(7, batch=2)
    try:
        check(run(caches, start, path, races=True), caches, start, path)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_what_it_refuses():
    supports = kernel_tpu.supports
    shape = lambda *s, dtype=jnp.bfloat16: [jax.ShapeDtypeStruct(s, dtype)]
    assert supports(shape(8, 8, 8192, 128), n_nodes=255, depth=DEPTH) is None
    assert "multiple of 16" in supports(shape(1, 1, 40, 8), n_nodes=8, depth=2)
    assert "no 8, 16 or 32" in supports(
        [jax.ShapeDtypeStruct((1, 1, 64, 8), np.float64)], n_nodes=8, depth=2
    )
    assert "32 bits" in supports(shape(1, 1, 128), n_nodes=8, depth=2)
    assert "longer than" in supports(shape(1, 1, 64, 8), n_nodes=2, depth=3)
    wide = shape(1, 64, 8192, 256, dtype=jnp.float32)
    assert "VMEM" in supports(wide, n_nodes=200, depth=3)
