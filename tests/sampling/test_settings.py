"""Which sampling settings are refused, and how."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling import Settings, check_sampling

NAN, INF = float("nan"), float("inf")
GOOD = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", NAN),
        ("temperature", -0.1),
        ("temperature", INF),
        ("temperature", -INF),
        # Beyond what scaled float32 logits can carry.
        ("temperature", 1e-37),
        ("temperature", 1e39),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", -0.5),
        ("top_p", NAN),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("min_p", NAN),
        ("seed", -1),
        ("seed", 2**32),
        ("seed", 0.5),
        ("seed", True),
        # Numbers that are no whole numbers either.
        ("top_k", INF),
        ("top_k", NAN),
        ("seed", INF),
        ("seed", NAN),
        # More than the int32 that carries it.
        ("top_k", 2**31),
    ],
)
def test_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value}")):
        check_sampling(**{**GOOD, name: value})
    with pytest.raises(ValueError, match=re.escape(f"{name}={value}")):
        Settings.full(2, **{**GOOD, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100),
        ("top_k", 0),
        ("top_k", np.int64(7)),
        ("top_k", 2**31 - 1),
        ("top_p", 1.0),
        ("top_p", 1e-6),
        ("min_p", 0.0),
        ("min_p", 0.999),
        ("seed", 0),
        ("seed", 2**32 - 1),
        ("seed", np.uint32(5)),
    ],
)
def test_ends_of_the_ranges_are_taken(name, value):
    check_sampling(**{**GOOD, name: value})
    settings = Settings.full(3, **{**GOOD, name: value})
    row = getattr(settings, name)
    assert row.shape == (3,)
    assert np.all(np.asarray(row) == np.asarray(value, row.dtype))


def test_dtypes_of_a_batch():
    settings = Settings.full(2)
    assert [x.dtype for x in settings] == [
        jnp.float32,
        jnp.int32,
        jnp.float32,
        jnp.float32,
        jnp.uint32,
    ]
    assert float(settings.temperature[0]) == 0.0
