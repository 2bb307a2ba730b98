"""The GPU kernel of ``write_rows`` in interpret mode, bit for bit."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_write_rows_checks import DTYPES, STARTS, check, check_has_teeth, make

from kernels_pallas.write_rows import kernel_gpu


@jax.jit
def run(keys, values, new_keys, new_values, start, rows=None):
    params = plgpu.InterpretGPUParams()
    return kernel_gpu.write_rows(
        keys, values, new_keys, new_values, start, rows, interpret=params
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_definition(dtype):
    arrays, start = make(0, dtype), jnp.asarray(STARTS, jnp.int32)
    check(run(*arrays, start), arrays, start)


def test_one_batch_row():
    arrays = make(2, jnp.bfloat16, n_rows=1)
    start = jnp.asarray([37], jnp.int32)
    found = run(*arrays, start, jnp.asarray([2], jnp.int32))
    check(found, arrays, start, jnp.asarray(2))
    with pytest.raises(AssertionError):
        check(found, arrays, start, jnp.asarray(3))


def test_a_pass_longer_than_shared_memory(monkeypatch):
    """In pieces of four rows, the last one shorter."""
    monkeypatch.setattr(kernel_gpu, "_SHARED_BYTES", 512)
    arrays = make(3, jnp.float32, n_rows=2, batch=2)
    start = jnp.asarray([5, 90], jnp.int32)
    check(run(*arrays, start), arrays, start)


def test_the_comparison_has_teeth():
    check_has_teeth(run)


def test_what_it_refuses():
    supports = kernel_gpu.supports
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    assert supports(shape(8, 8, 8192, 128), n_new=256) is None
    assert "16 bytes" in supports(shape(1, 1, 64, 4), n_new=8)
    assert "shared memory" in supports(shape(1, 1, 64, 2**14), n_new=8)
