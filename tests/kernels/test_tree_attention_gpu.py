"""The GPU kernel of tree attention, in Mosaic GPU's interpreter."""

import functools

import attention_checks as checks
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.tree_attention.kernel_gpu import (
    SMEM_BYTES,
    device_arch,
    supports,
    tree_attention,
)

# The interpreter multiplies in NumPy, which warns of the NaN that keys may hold.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

ARCHS = ("sm_90", "sm_120")
both = pytest.mark.parametrize("arch", ARCHS)


def kernel(arch="sm_90", chain=False, races=False, **fixed):
    """Binds the kernel; ``chain`` passes no mask."""
    interpret = plgpu.InterpretGPUParams(detect_races=races)
    fixed = {"split": 128, "arch": arch, "interpret": interpret, **fixed}

    def bound(*args, mask, offsets, **kind):
        if chain:
            mask = offsets = None
        return tree_attention(*args, mask=mask, offsets=offsets, **kind, **fixed)

    return bound


make_case = functools.partial(checks.make_case, dtype="bfloat16", slots=256)


@both
def test_chain_without_a_mask(arch):
    case = make_case([0, 63, 64, 200], 5, shape="chain", group=3)
    names = checks.check(kernel(arch, chain=True), case)
    assert {"zeros", "keys as values", "rows rolled", "heads swapped"} <= set(names)
    assert {"length ignored", "block dropped"} <= set(names)


@both
def test_trees_of_several_tiles(arch):
    case = make_case([3, 100, 180], 40, group=3)
    names = checks.check(kernel(arch), case)
    assert {"mask ignored", "length ignored"} <= set(names)


@pytest.mark.parametrize("shape", ["star", "random", "chain"])
def test_trees_across_a_split(shape):
    """The pass's rows begin in one split and end in the next one's second block."""
    case = make_case([120], 10, shape=shape, width=128)
    checks.check(kernel("sm_120"), case)


@both
@pytest.mark.parametrize(("window", "sinks"), [(20, 0), (70, 0), (64, 5), (1, 3)])
def test_window_and_sinks(arch, window, sinks):
    case = make_case([2, 110, 230], 7, window=window, sinks=sinks)
    assert "mask ignored" in checks.check(kernel(arch), case)


@pytest.mark.parametrize("chain", [True, False])
def test_soft_cap_and_window(chain):
    case = make_case([9, 205], 6, shape="chain", soft_cap=20.0, window=90, sinks=2)
    checks.check(kernel(chain=chain), case)


@both
@pytest.mark.parametrize("kv_dtype", checks.QUANTIZED)
def test_quantized_cache(arch, kv_dtype):
    case = make_case([0, 62, 190], 5, kv_dtype=kv_dtype, width=128)
    checks.check(kernel(arch), case)


def test_rows_of_the_cache():
    case = make_case([40, 7], 3, batch=4, rows=[3, 1])
    checks.check(kernel(), case)


@pytest.mark.parametrize("window", [None, 100])
def test_splits_one_after_the_other_are_the_same(window):
    """Whether one thread block takes all splits changes no bit."""
    case = make_case([5, 130, 400], 3, slots=512, window=window, sinks=window and 4)
    args = checks.poisoned(case)
    apart = checks.call(kernel(sequential=False), args)
    np.testing.assert_array_equal(apart, checks.call(kernel(sequential=True), args))


@pytest.mark.parametrize("chain", [True, False])
@both
def test_a_row_has_the_same_bits_in_any_pass(arch, chain):
    """Alone, at another place of a pass, in another batch: the same result."""
    case = make_case([125, 30], 40, shape="chain", group=3)
    run = kernel(arch, chain=chain)
    whole = checks.call(run, checks.poisoned(case))
    for row, first, n_new in ((0, 0, 1), (0, 17, 1), (0, 30, 6), (1, 33, 7)):
        part = checks.call(run, checks.poisoned(checks.only(case, row, first, n_new)))
        np.testing.assert_array_equal(part[0], whole[row, first : first + n_new])


def test_a_chain_is_its_own_tree():
    case = make_case([61, 128], 9, shape="chain")
    one, other = (checks.call(kernel(chain=c), case) for c in (True, False))
    np.testing.assert_array_equal(one, other)


@given(data=st.data())
@settings(max_examples=4, deadline=None, derandomize=True)
def test_any_pass(data):
    draw = lambda *values: data.draw(st.sampled_from(values))
    n_new = data.draw(st.integers(1, 20))
    length = data.draw(st.lists(st.integers(0, 256 - n_new), min_size=1, max_size=2))
    window = draw(None, 3, 65)
    case = make_case(
        length,
        n_new,
        n_kv=draw(1, 2),
        group=draw(1, 4),
        shape=draw("chain", "star", "random"),
        window=window,
        sinks=draw(0, 1, 70) if window else 0,
        soft_cap=draw(None, 30.0),
        kv_dtype=draw(None, "int8"),
        seed=data.draw(st.integers(0, 99)),
    )
    checks.check(kernel(draw(*ARCHS), sequential=draw(True, False)), case)


def test_no_races():
    """Stages are not written while they are read."""
    case = make_case([250], 2, n_kv=1, slots=512, shape="chain")
    out = checks.call(kernel(races=True, split=256, smem_bytes=60_000), case)
    part = checks.tolerance(case)
    assert checks.is_close(out, checks.exact(case), part)


def test_what_it_refuses():
    case = make_case([4], 2)
    ok = functools.partial(supports, arch="sm_90")
    assert ok(case.q, case.keys) is None
    assert "float32" in ok(case.q, case.keys.astype(jnp.float32))
    assert "queries" in ok(case.q.astype(jnp.float32), case.keys)
    assert "scales" in ok(case.q, case.keys.astype(jnp.int8))
    assert "wide" in ok(case.q[..., :32], case.keys[..., :32])
    assert "shared memory" in ok(case.q, case.keys, smem_bytes=40_000)
    assert "device" in supports(case.q, case.keys, arch=None)
    with pytest.raises(ValueError, match="float32; tensor cores"):
        checks.call(kernel(), make_case([4], 2, kv_dtype="float32"))
    with pytest.raises(ValueError, match="split=96"):
        checks.call(kernel(split=96), case)


def test_instructions_by_compute_capability():
    found = [device_arch(c) for c in ("9.0", "12.0", "12.1", (9, 0), "8.0", "10.0")]
    assert found == ["sm_90", "sm_120", "sm_120", "sm_90", None, None]
    assert set(SMEM_BYTES) == set(ARCHS)
