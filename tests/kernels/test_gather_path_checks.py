"""``gather_path``: the definition, XLA's form, the choice, what the checks catch."""

import functools
import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.ops.gather_path import gather_path, gather_path_reference
from specjax.ops.gather_path.xla import gather_path_xla

DTYPES = (jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn)
# Rows begin in the middle of tiles, of words, and at the very ends.
BATCH, HEADS, SLOTS, WIDTH, NODES, DEPTH = 6, 2, 128, 16, 11, 4
STARTS = (0, 1, 18, 31, 55, SLOTS - NODES)


def bits(x):
    """The array as integers: NaNs are compared by their bits."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def noise(rng, shape, dtype):
    """Random bits: among the floats many NaNs of all kinds."""
    n_bytes = jnp.dtype(dtype).itemsize
    raw = rng.integers(0, 256, (*shape, n_bytes), np.uint8)
    return jnp.asarray(raw.view(jnp.dtype(dtype))[..., 0])


def make_caches(seed, dtype, *, layers=2, scales=False, shape=None):
    rng = np.random.default_rng(seed)
    shape = shape or (BATCH, HEADS, SLOTS, WIDTH)
    caches = [noise(rng, shape, dtype) for _ in range(2 * layers)]
    if scales:
        caches.insert(1, noise(rng, shape[:3], jnp.float32))
    return caches


def make_paths(seed, batch=BATCH, nodes=NODES, depth=DEPTH):
    """The last two rows: nothing kept, and a chain that stays where it is."""
    rng = np.random.default_rng(seed)
    paths = np.full((batch, depth), -1, np.int32)
    for row in paths:
        n = rng.integers(1, depth + 1)
        row[:n] = np.sort(rng.choice(nodes, n, replace=False))
    if batch > 2:
        paths[-2], paths[-1] = -1, np.arange(depth)
    return jnp.asarray(paths)


def check(found, caches, start, path):
    """All arrays bit for bit, also what was not to be touched."""
    wanted = by_definition(caches, start, path)
    for x, y, cache in zip(found, wanted, caches, strict=True):
        assert (x.shape, x.dtype) == (cache.shape, cache.dtype)
        np.testing.assert_array_equal(bits(x), y)


def by_definition(caches, start, path):
    """The results as integers: XLA on a CPU may flush the smallest floats to zero."""
    return gather_path_reference([jnp.asarray(bits(x)) for x in caches], start, path)


def check_has_teeth(run):
    """A kernel that is told something else fails the comparison."""
    caches, start = make_caches(0, jnp.bfloat16), jnp.asarray(STARTS, jnp.int32)
    path = make_paths(0)
    check(run(caches, start, path), caches, start, path)
    identity = jnp.broadcast_to(jnp.arange(DEPTH), path.shape)
    for args in (
        (start, identity),
        (start + 1, path),
        (start, jnp.where(path >= 0, path + 1, path)),
        (start[::-1], path),
        (start, jnp.roll(path, 1, axis=0)),
        (start, path.at[0].set(-1)),
    ):
        with pytest.raises(AssertionError):
            check(run(caches, *args), caches, start, path)
    swapped = [caches[1], caches[0], *caches[2:]]
    with pytest.raises(AssertionError):
        check(run(swapped, start, path), caches, start, path)


def test_the_definition_moves_nodes_by_hand():
    x = jnp.arange(20, dtype=jnp.float32).reshape(2, 1, 10)
    start, path = jnp.asarray([3, 0]), jnp.asarray([[1, 2, 5], [0, 4, -1]])
    (found,) = gather_path_reference([x], start, path)
    assert found[0, 0].tolist() == [0, 1, 2, 4, 5, 8, 6, 7, 8, 9]
    assert found[1, 0].tolist() == [10, 14, 12, 13, 14, 15, 16, 17, 18, 19]


def test_the_choice():
    caches = {"layer": make_caches(2, jnp.bfloat16)}
    start, path = jnp.asarray(STARTS, jnp.int32), make_paths(2)
    found = jax.jit(gather_path, static_argnums=3)(caches, start, path, NODES)
    by_name = functools.partial(gather_path, implementation="xla")
    named = jax.jit(by_name, static_argnums=3)(caches, start, path, NODES)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(bits(x), bits(y)), found, named
    )
    odd = [x[:, :, :120] for x in caches["layer"]]
    low = jnp.minimum(start, 100)
    with pytest.raises(ValueError, match="120 slots of bfloat16 .* multiple of 16"):
        gather_path(odd, low, path, NODES, implementation="pallas_tpu")
    narrow = [caches["layer"][0][..., :4]]
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        gather_path(narrow, start, path, NODES, implementation="pallas_gpu")
    with pytest.raises(ValueError, match="do not agree"):
        gather_path(caches, start, path, DEPTH - 1)
    with pytest.raises(ValueError, match="at least 200 slots"):
        gather_path(caches, start, path, 200)
    assert gather_path(caches, start, path[:, :0], NODES) is caches


MESH = """
    import json
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from kernels_pallas.gather_path.partition import partitioned
    from specjax.ops.gather_path import gather_path_reference
    from specjax.sharding import make_mesh

    mesh = make_mesh(data=2, model=2)
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    caches = [make(4, 2, 32, 8), make(4, 2, 32, 8), make(4, 2, 32)]
    start = jnp.asarray([0, 3, 9, 20])
    path = jnp.asarray([[0, 2, 3], [1, -1, -1], [-1, -1, -1], [2, 4, 7]])
    seen = []

    def local(caches, start, path):
        seen.append((caches[0].shape, caches[2].shape, path.shape))
        return gather_path_reference(caches, start, path)

    for axes in (("data", "model"), (None, "model"), ("data", None), (None, None)):
        split = [put(x, *axes) for x in caches]
        function = jax.jit(lambda *a: partitioned(local, *a))
        text = function.lower(split, put(start), put(path)).compile().as_text()
        found = function(split, put(start), put(path))
        wanted = gather_path_reference(caches, start, path)
        same = all(np.array_equal(x, y) for x, y in zip(found, wanted))
        kept = all(x.sharding.is_equivalent_to(y.sharding, x.ndim)
                   for x, y in zip(found, split))
        print(json.dumps([same, kept, text.count("all-gather"), seen[-1]]))
"""


def test_on_a_mesh_each_device_has_its_own_heads_and_rows():
    lines = on_four_devices(MESH)
    batches, heads = (2, 4, 2, 4), (1, 1, 2, 2)
    for line, b, k in zip(lines, batches, heads, strict=True):
        same, kept, n_gathers, seen = line
        assert (same, kept, n_gathers) == (True, True, 0)
        assert seen == [[b, k, 32, 8], [b, k, 32], [b, 3]]


def on_four_devices(program):
    """Runs a program in a process with four CPU devices; returns its lines."""
    flags = os.environ.get("XLA_FLAGS", "")
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=4".strip(),
    }
    env.pop("JAX_NUM_CPU_DEVICES", None)
    command = [sys.executable, "-c", textwrap.dedent(program)]
    out = subprocess.run(command, capture_output=True, text=True, env=env)
    assert not out.returncode, out.stderr[-3000:]
    return [json.loads(x) for x in out.stdout.splitlines() if x.startswith("[")]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_xla_form_is_the_definition(dtype):
    """But in the slots of -1, which are of no interest."""
    caches = make_caches(1, dtype, scales=True)
    start, path = jnp.asarray(STARTS, jnp.int32), make_paths(1)
    found = jax.jit(gather_path_xla, static_argnums=3)(caches, start, path, NODES)
    at = np.arange(SLOTS)[None] - np.asarray(start)[:, None]
    ends = (at >= 0) & (at < DEPTH)
    ends &= np.take_along_axis(np.asarray(path), at.clip(0, DEPTH - 1), 1) < 0
    assert ends.any()
    wanted = by_definition(caches, start, path)
    for x, y in zip(found, wanted, strict=True):
        kept = ~ends[:, None, :]
        x, y = (np.moveaxis(z, 2, -1) for z in (bits(x), np.asarray(y)))
        if x.ndim == 4:
            kept = kept[:, None]
        np.testing.assert_array_equal(np.where(kept, x, 0), np.where(kept, y, 0))
