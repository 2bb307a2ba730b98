"""The GPU kernel of ``gather_path`` in interpret mode, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_gather_path_checks import (
    DTYPES,
    NODES,
    STARTS,
    check,
    check_has_teeth,
    make_caches,
    make_paths,
)

from kernels_pallas.gather_path import kernel_gpu


@functools.partial(jax.jit, static_argnames=("nodes", "races"))
def run(caches, start, path, nodes=NODES, races=False):
    params = plgpu.InterpretGPUParams(detect_races=races)
    return kernel_gpu.gather_path(caches, start, path, nodes, interpret=params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_definition(dtype):
    caches = make_caches(0, dtype, scales=True)
    start = jnp.asarray(STARTS, jnp.int32)
    path = make_paths(0)
    check(run(caches, start, path), caches, start, path)


def test_a_path_longer_than_shared_memory(monkeypatch):
    """In chunks; nodes that an earlier chunk wrote over are not read by a later one."""
    monkeypatch.setattr(kernel_gpu, "_SHARED_BYTES", 512)
    caches = make_caches(1, jnp.float32, layers=1, shape=(2, 2, 64, 16))
    start = jnp.asarray([3, 20], jnp.int32)
    path = make_paths(2, batch=2, nodes=30, depth=12)
    check(run(caches, start, path, nodes=30), caches, start, path)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_without_races_in_the_gpu_interpreter(dtype):
    caches = make_caches(6, dtype, layers=1, scales=True, shape=(2, 2, 64, 16))
    start = jnp.asarray([5, 40], jnp.int32)
    path = make_paths(7, batch=2)
    check(run(caches, start, path, races=True), caches, start, path)


def test_the_comparison_has_teeth():
    check_has_teeth(run)


def test_what_it_refuses():
    supports = kernel_gpu.supports
    shape = lambda *s: [jax.ShapeDtypeStruct(s, jnp.bfloat16)]
    assert supports(shape(8, 8, 8192, 128), n_nodes=255, depth=16) is None
    assert "16 bytes" in supports(shape(1, 1, 64, 4), n_nodes=8, depth=2)
    assert "scales" in supports(shape(1, 1, 256), n_nodes=80, depth=80)
    assert "heads" in supports(shape(1, 300, 64, 8), n_nodes=8, depth=2)
    assert "longer than" in supports(shape(1, 1, 64, 8), n_nodes=2, depth=3)
