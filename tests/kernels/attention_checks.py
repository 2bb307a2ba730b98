"""What every kernel of tree attention must give, and wrong answers it must not pass.

A kernel under test is a function of the common signature,

    kernel(q, keys, values, length, *, rows, mask, offsets, scale, window, sinks,
           soft_cap, key_scale, value_scale) -> float32 [R, T, H, M]

with its configuration and interpreter already bound.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

QUANTIZED = ("int8", "float8_e4m3fn")
#: Allowed error as a part of the largest value, where products round to bfloat16:
#: two roundings of half a unit in the last of 8 bits.
NARROW = 2**-8


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of one call. Slots that are never used hold finite numbers here."""

    q: Any
    keys: Any
    values: Any
    length: Any
    rows: Any
    mask: Any
    offsets: Any
    kind: dict[str, Any]  # scale, window, sinks, soft_cap
    key_scale: Any = None
    value_scale: Any = None

    @property
    def end(self):
        return self.length + self.q.shape[1]


def tree(shape, n_new, seed=0):
    """Gives (mask, offsets) of a pass's rows: a chain, siblings, or a random tree."""
    parent = np.arange(-1, n_new - 1)
    if shape == "star":
        parent[1:] = 0
    elif shape == "random":
        rng = np.random.default_rng(seed)
        parent[1:] = [rng.integers(0, t) for t in range(1, n_new)]
    mask, offsets = np.zeros((n_new, n_new), bool), np.zeros(n_new, np.int32)
    for t in range(n_new):
        if t:
            mask[t] = mask[parent[t]]
            offsets[t] = offsets[parent[t]] + 1
        mask[t, t] = True
    return mask, offsets


def make_case(
    length,
    n_new,
    *,
    n_kv=2,
    group=2,
    width=64,
    slots=512,
    dtype="float32",
    kv_dtype=None,
    shape="random",
    window=None,
    sinks=0,
    soft_cap=None,
    batch=None,
    rows=None,
    seed=0,
):
    """Draws a case: query rows at the given lengths, each with a tree of its own.

    ``dtype`` is of the queries, ``kv_dtype`` of the cache (None: the same); ``rows``
    are the cache's rows that the queries address (None: row r addresses row r).
    """
    length = np.asarray(length, np.int32)
    n_rows, kv_dtype = len(length), kv_dtype or dtype
    rows = np.arange(n_rows) if rows is None else np.asarray(rows)
    batch = batch or int(rows.max()) + 1
    assert (length + n_new <= slots).all()
    rng = np.random.default_rng([seed, n_rows, n_new, n_kv, group, width])
    q = rng.normal(size=(n_rows, n_new, n_kv * group, width)) * 2
    keys, values = (rng.normal(size=(batch, n_kv, slots, width)) for _ in range(2))
    # Equal means would hide which rows and heads an average was taken of.
    values += rng.normal(size=(batch, n_kv, 1, width))
    scales = {}
    if kv_dtype in QUANTIZED:
        keys, scales["key_scale"] = _quantize(keys, kv_dtype)
        values, scales["value_scale"] = _quantize(values, kv_dtype)
    trees = [tree(shape, n_new, [seed, r]) for r in range(n_rows)]
    return Case(
        jnp.asarray(q, dtype),
        jnp.asarray(keys, kv_dtype),
        jnp.asarray(values, kv_dtype),
        length,
        rows.astype(np.int32),
        np.stack([m for m, _ in trees]),
        np.stack([o for _, o in trees]),
        dict(scale=width**-0.5, window=window, sinks=sinks, soft_cap=soft_cap),
        **scales,
    )


def _quantize(x, dtype):
    """Scales slots to the type's range; returns float64 numbers of it and factors."""
    top = 127 if dtype == "int8" else 448
    factor = (np.abs(x).max(-1) / top).astype(np.float32)
    x = x / factor[..., None]
    return (np.round(x) if dtype == "int8" else x), factor


def poisoned(case, junk=np.nan):
    """Spoils what no row may use: rows not addressed, slots at the end and beyond."""
    batch, _, slots, _ = case.keys.shape
    dead = np.ones((batch, slots), bool)
    for r, b in enumerate(case.rows):
        dead[b] &= np.arange(slots) >= case.end[r]
    dead = dead[:, None, :]
    spoil = lambda x: None if x is None else np.where(dead, junk, x).astype(np.float32)
    changes = dict(key_scale=spoil(case.key_scale), value_scale=spoil(case.value_scale))
    for name in ("keys", "values"):
        x = getattr(case, name)
        bad = jnp.asarray(127 if x.dtype == jnp.int8 else junk, x.dtype)
        changes[name] = jnp.where(dead[..., None], bad, x)
    return dataclasses.replace(case, **changes)


def call(kernel, case):
    """Calls a kernel with a case's arguments."""
    place = lambda x: None if x is None else jnp.asarray(x)
    return np.asarray(
        kernel(
            case.q,
            case.keys,
            case.values,
            jnp.asarray(case.length),
            rows=place(case.rows),
            mask=place(case.mask),
            offsets=place(case.offsets),
            key_scale=place(case.key_scale),
            value_scale=place(case.value_scale),
            **case.kind,
        )
    )


def seen(case, wrong=None):
    """Says which slots each row sees. bool [R, T, S]"""
    n_new, slots = case.q.shape[1], case.keys.shape[2]
    out = np.zeros((len(case.length), n_new, slots), bool)
    for r, length in enumerate(case.length):
        stands = np.arange(slots)
        stands[length : length + n_new] = length + case.offsets[r]
        view = np.zeros((n_new, slots), bool)
        view[:, :length] = True
        view[:, length : length + n_new] = case.mask[r]
        if wrong == "mask ignored":
            view[:, length : length + n_new] = True
        if case.kind["window"] is not None:
            first = (length + case.offsets[r])[:, None] - case.kind["window"] + 1
            view &= (stands >= first) | (stands < case.kind["sinks"])
        if wrong == "length ignored":
            view[:, length + n_new :] = True
        if wrong == "block dropped":
            view[:, max(0, length - 128) : length] = False
        out[r] = view
    return out


def exact(case, wrong=None):
    """The definition in float64, or a wrong answer of a given name."""
    n_rows, n_new, n_heads, width = case.q.shape
    n_kv = case.keys.shape[1]
    scaled = lambda x, by: (
        np.asarray(x, np.float64) * (1 if by is None else by[..., None])
    )
    keys, values = (
        scaled(case.keys, case.key_scale)[case.rows],
        scaled(case.values, case.value_scale)[case.rows],
    )
    if wrong == "keys as values":
        values = keys
    q = np.asarray(case.q, np.float64).reshape(n_rows, n_new, n_kv, -1, width)
    scores = np.einsum("rtkgm,rksm->rtkgs", q, keys) * case.kind["scale"]
    if cap := case.kind["soft_cap"]:
        scores = cap * np.tanh(scores / cap)
    view = seen(case, wrong)[:, :, None, None, :]
    scores = np.where(view, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("rtkgs,rksm->rtkgm", weights, values)
    if wrong == "zeros":
        out = np.zeros_like(out)
    if wrong == "rows rolled":
        out = np.roll(out, 1, axis=1)
    if wrong == "heads swapped":
        out = np.roll(out, 1, axis=3)
    return out.reshape(n_rows, n_new, n_heads, width)


def wrongs(case):
    """Names the wrong answers that differ from the right one in this case."""
    n_new, n_heads, n_kv = *case.q.shape[1:3], case.keys.shape[1]
    names = ["zeros", "keys as values"]
    names += ["rows rolled"] * (n_new > 1) + ["heads swapped"] * (n_heads > n_kv)
    right = seen(case)
    for name in ("mask ignored", "length ignored", "block dropped"):
        view = seen(case, name)
        if (view != right).any() and view.any(-1).all():
            names.append(name)
    return names


def tolerance(case, narrow=None):
    """Returns the allowed error as a part of the largest value.

    ``narrow``: products are rounded to bfloat16; None: unless all is float32.
    """
    if narrow is None:
        narrow = not case.q.dtype == case.keys.dtype == jnp.float32
    length = int(seen(case).sum(-1).max()) + case.q.shape[-1]
    return NARROW if narrow else 5e-7 * np.sqrt(length)


def is_close(out, expected, part):
    """Says whether an answer is right, every row by its own magnitude."""
    scale = np.abs(expected).max((-2, -1), keepdims=True)
    return bool(np.all(np.abs(out - expected) <= part * scale))


def check(kernel, case, *, narrow=None):
    """Compares a kernel with the definition; unused slots hold NaN.

    Returns:
      The names of the wrong answers that the same comparison refused.
    """
    expected, part = exact(case), tolerance(case, narrow)
    out = call(kernel, poisoned(case))
    assert out.dtype == np.float32 and out.shape == expected.shape
    assert np.isfinite(out).all(), "what no row may use leaked"
    scale = np.abs(expected).max((-2, -1), keepdims=True)
    worst = np.max(np.abs(out - expected) / scale)
    assert is_close(out, expected, part), f"{worst=:.2e} of the largest, {part=:.2e}"
    for name in (names := wrongs(case)):
        assert not is_close(exact(case, name), expected, part), f"{name} passes"
    return names


def only(case, row, first, n_new):
    """Cuts a case of chains to rows [first, first + n_new) of one query row."""
    cut = slice(first, first + n_new)
    return dataclasses.replace(
        case,
        q=case.q[row : row + 1, cut],
        length=case.length[row : row + 1] + first,
        rows=case.rows[row : row + 1],
        mask=case.mask[row : row + 1, cut, cut],
        offsets=case.offsets[row : row + 1, cut] - first,
    )


def bind(kernel, **fixed):
    """Fixes a kernel's configuration and interpreter."""
    return functools.partial(kernel, **fixed)
