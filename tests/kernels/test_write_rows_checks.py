"""``write_rows``: the definition, XLA's form, the choice, and what the checks catch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_gather_path_checks import DTYPES, bits, noise, on_four_devices

from specjax.ops.write_rows import write_rows, write_rows_reference
from specjax.ops.write_rows.xla import write_rows_xla

BATCH, HEADS, SLOTS, WIDTH, NEW = 6, 2, 128, 16, 11
# Rows begin in the middle of tiles, of words, and at the very ends.
STARTS = (0, 1, 18, 31, 55, SLOTS - NEW)


def make(seed, dtype, *, n_new=NEW, n_rows=BATCH, batch=BATCH, slots=SLOTS):
    """Caches and new rows of random bits, NaNs among them."""
    rng = np.random.default_rng(seed)
    shape, new = (batch, HEADS, slots, WIDTH), (n_rows, n_new, HEADS, WIDTH)
    return [noise(rng, s, dtype) for s in (shape, shape, new, new)]


def check(found, arrays, start, row=None):
    """Both arrays bit for bit, also what was not to be touched."""
    cache = arrays[0]
    # As integers: XLA on a CPU may flush the smallest floats to zero.
    whole = [jnp.asarray(bits(x.astype(cache.dtype))) for x in arrays]
    wanted = write_rows_reference(*whole, start, row)
    for x, y in zip(found, wanted, strict=True):
        assert (x.shape, x.dtype) == (cache.shape, cache.dtype)
        np.testing.assert_array_equal(bits(x), y)


def check_has_teeth(run):
    """A kernel that is told something else fails the comparison."""
    arrays, start = make(0, jnp.bfloat16), jnp.asarray(STARTS, jnp.int32)
    keys, values, new_keys, new_values = arrays
    check(run(*arrays, start), arrays, start)
    for args in (
        (*arrays, start + 1),
        (*arrays, start[::-1]),
        (keys, values, new_values, new_keys, start),
        (keys, values, new_keys[::-1], new_values, start),
        (keys, values, new_keys[:, ::-1], new_values, start),
        (keys, values, new_keys[:, :, ::-1], new_values, start),
        (keys, keys, new_keys, new_values, start),
    ):
        with pytest.raises(AssertionError):
            check(run(*args), arrays, start)


def test_the_definition_writes_rows_by_hand():
    x = jnp.zeros((2, 1, 5, 1))
    new = jnp.asarray([[1, 2], [3, 4]], jnp.float32).reshape(2, 2, 1, 1)
    keys, values = write_rows_reference(x, x + 9, new, -new, jnp.asarray([0, 3]))
    assert keys[..., 0].tolist() == [[[1, 2, 0, 0, 0]], [[0, 0, 0, 3, 4]]]
    assert values[..., 0].tolist() == [[[-1, -2, 9, 9, 9]], [[9, 9, 9, -3, -4]]]
    keys, _ = write_rows_reference(
        x, x, new[:1], new[:1], jnp.asarray([2]), jnp.asarray(1)
    )
    assert keys[..., 0].tolist() == [[[0, 0, 0, 0, 0]], [[0, 0, 1, 2, 0]]]


def test_the_choice():
    arrays, start = make(2, jnp.bfloat16), jnp.asarray(STARTS, jnp.int32)
    check(jax.jit(write_rows)(*arrays, start), arrays, start)
    keys, values, new_keys, new_values = arrays
    with pytest.raises(ValueError, match="120 slots of bfloat16 .* multiple of 16"):
        write_rows(
            keys[:, :, :120],
            values[:, :, :120],
            new_keys,
            new_values,
            start,
            implementation="pallas_tpu",
        )
    with pytest.raises(ValueError, match="16 bytes"):
        narrow = [x[..., :4] for x in arrays]
        write_rows(*narrow, start, implementation="pallas_gpu")
    with pytest.raises(ValueError, match="do not agree"):
        write_rows(keys, values, new_keys[:2], new_values[:2], start[:2])
    with pytest.raises(ValueError, match="differ"):
        write_rows(keys, values.astype(jnp.float32), new_keys, new_values, start)


MESH = """
    import json
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from kernels_pallas.write_rows.partition import partitioned
    from specjax.ops.write_rows import write_rows_reference
    from specjax.sharding import make_mesh

    mesh = make_mesh(data=2, model=2)
    put = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    keys, values = make(4, 2, 32, 8), make(4, 2, 32, 8)
    seen = []

    def whole(*args):
        seen.append([args[0].shape, args[2].shape])
        return write_rows_reference(*args)

    def one(*args):
        seen.append([args[0].shape, args[2].shape])
        return write_rows_reference(*args[:5], args[5][0])

    for function, axes, rows in (
        (whole, ("data", "model"), 4), (whole, (None, "model"), 4),
        (one, (None, "model"), 1),
    ):
        new = [make(rows, 3, 2, 8), make(rows, 3, 2, 8)]
        start = jnp.asarray([0, 3, 9, 20][:rows])
        rest = () if rows == 4 else (jnp.asarray([2]),)
        news = [put(x, axes[0], None, axes[1]) for x in new]
        split = (put(keys, *axes), put(values, *axes), *news, put(start))
        split = (*split, *map(put, rest))
        call = jax.jit(lambda *a, function=function: partitioned(function, *a))
        text = call.lower(*split).compile().as_text()
        found = call(*split)
        wanted = function(keys, values, *new, start, *rest)
        del seen[-1]
        same = all(np.array_equal(x, y) for x, y in zip(found, wanted))
        kept = all(x.sharding.is_equivalent_to(y.sharding, x.ndim)
                   for x, y in zip(found, split))
        print(json.dumps([same, kept, text.count("all-gather"), seen[-1]]))
"""


def test_on_a_mesh_each_device_has_its_own_heads_and_rows():
    lines = on_four_devices(MESH)
    shapes = (
        [[2, 1, 32, 8], [2, 3, 1, 8]],
        [[4, 1, 32, 8], [4, 3, 1, 8]],
        [[4, 1, 32, 8], [1, 3, 1, 8]],
    )
    for line, shape in zip(lines, shapes, strict=True):
        assert line == [True, True, 0, shape]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [None, 2])
def test_the_xla_form_is_the_definition(dtype, row):
    arrays = make(1, dtype, n_rows=BATCH if row is None else 1)
    start = jnp.asarray(STARTS if row is None else STARTS[3:4], jnp.int32)
    row = None if row is None else jnp.asarray(row)
    check(jax.jit(write_rows_xla)(*arrays, start, row), arrays, start, row)
