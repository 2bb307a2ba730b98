"""The TPU kernel of ``verify_sample`` in interpret mode against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from test_verify_sample_checks import (
    KINDS,
    RULES,
    Tally,
    by_reference,
    compare,
    make_case,
    teeth_case,
    wrong,
)

from kernels_pallas.verify_sample import kernel_tpu
from specjax.ops.verify_sample import Decision, verify_sample

# Not multiples of 128, of 256 or of a sweep's step; one token more than a step; whole.
SIZES = (300, 1025, 2048, 2500)

slow = pytest.mark.slow


@functools.partial(jax.jit, static_argnames=("rule", "interpret"))
def run(logits, drafts, settings, noise, *, rule, interpret=True):
    given = {}
    if rule == "coupled":
        given = {"gumbel": noise}
    elif rule == "rejection":
        given = {
            "accept": noise.accept,
            "draw": noise.draw,
            "logprobs": drafts.logprobs,
        }
    fields = ("temperature", "top_k", "top_p", "min_p")
    given |= {name: getattr(settings, name) for name in fields}
    args = (logits, drafts.tokens, drafts.n_valid)
    found = kernel_tpu.verify_sample(*args, rule=rule, interpret=interpret, **given)
    return Decision(*found)


def by_kernel(case, interpret=True):
    given = (case.logits, case.drafts, case.settings, case.noise)
    return run(*given, rule=case.rule, interpret=interpret)


def check(case, **kwargs):
    found, wanted = by_kernel(case, **kwargs), by_reference(case)
    np.testing.assert_allclose(
        found.log_normalizer, wanted.log_normalizer, rtol=1e-6, atol=1e-5
    )
    return compare(case, found, wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "vocab", [pytest.param(v, marks=slow) for v in SIZES[:3]] + [2500]
)
def test_decides_as_the_reference_but_for_near_ties(rule, vocab):
    tally = Tally()
    for seed, kind in enumerate(KINDS):
        tally += check(make_case(rule, vocab=vocab, kind=kind, seed=seed))
    print(rule, vocab, dict(tally))
    assert tally["differ"] <= 0.05 * tally["rows"]
    assert tally["near"] <= 0.25 * tally["rows"]


@pytest.mark.parametrize(
    ("rule", "n_drafts", "law", "dtype"),
    [
        ("rejection", 3, False, "float32"),
        pytest.param("rejection", 8, True, "bfloat16", marks=slow),
        pytest.param("rejection", 0, False, "float32", marks=slow),
        pytest.param("coupled", 0, False, "bfloat16", marks=slow),
        pytest.param("coupled", 8, False, "float32", marks=slow),
        pytest.param("greedy", 7, True, "bfloat16", marks=slow),
    ],
)
def test_widths_and_types(rule, n_drafts, law, dtype):
    tally = Tally()
    for seed, kind in enumerate(KINDS):
        case = make_case(
            rule, n_drafts=n_drafts, law=law, dtype=dtype, kind=kind, seed=seed
        )
        tally += check(case)
    assert tally["differ"] <= 0.05 * tally["rows"]


@slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**20),
    rule=st.sampled_from(RULES),
    kind=st.sampled_from(KINDS),
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 1.0, 50.0]),
    top_k=st.integers(0, 1001),
    top_p=st.sampled_from([1e-7, 0.1, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-3, 0.5]),
)
def test_any_settings(seed, rule, kind, **given):
    check(make_case(rule, batch=4, kind=kind, seed=seed, **given))


@pytest.mark.parametrize("rule", RULES)
def test_what_does_not_count_is_not_looked_at(rule):
    """Rows beyond ``n_valid`` may hold NaN, bit for bit without effect."""
    case = make_case(rule, n_drafts=4, seed=3)
    n_valid = np.arange(6, dtype=np.int32) % 5
    beyond = np.arange(5)[None] > n_valid[:, None]
    logits = np.where(beyond[..., None], np.nan, case.logits)
    drafts = case.drafts._replace(n_valid=n_valid)
    law = np.where(beyond[:, 1:, None], np.nan, drafts.logprobs)
    poisoned = case.replace(logits=logits, drafts=drafts._replace(logprobs=law))
    found, wanted = by_kernel(poisoned), by_kernel(case.replace(drafts=drafts))
    np.testing.assert_array_equal(found.n_accepted, wanted.n_accepted)
    np.testing.assert_array_equal(found.next_token, wanted.next_token)
    counts = ~beyond
    np.testing.assert_array_equal(
        np.asarray(found.log_normalizer)[counts],
        np.asarray(wanted.log_normalizer)[counts],
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "bad", [np.nan, *(pytest.param(x, marks=slow) for x in (np.inf, -np.inf))]
)
def test_rows_without_a_law_are_reported(rule, bad):
    """The normaliser says which; up to there the decision is the reference's."""
    case = make_case(rule, batch=8, n_drafts=3, seed=4, top_k=0, top_p=1.0, min_p=0.0)
    logits = case.logits.copy()
    at = np.arange(8) % 4
    for b, i in enumerate(at):
        where = slice(None) if bad == -np.inf else 7 + 100 * b
        logits[b, i, where] = bad
    broken = case.replace(logits=logits)
    found, wanted = by_kernel(broken), by_reference(broken)
    lost = ~np.isfinite(np.asarray(wanted.log_normalizer))
    assert lost.sum() == 8
    np.testing.assert_array_equal(~np.isfinite(np.asarray(found.log_normalizer)), lost)
    np.testing.assert_array_equal(
        np.asarray(found.log_normalizer)[lost], np.asarray(wanted.log_normalizer)[lost]
    )
    # What ends before the bad row is decided; what comes to it stops there or goes on
    # with a token that the loop throws away.
    before = np.asarray(by_reference(case).n_accepted) < at
    assert before.any()
    np.testing.assert_array_equal(
        np.asarray(found.n_accepted)[before], np.asarray(wanted.n_accepted)[before]
    )
    np.testing.assert_array_equal(
        np.asarray(found.next_token)[before], np.asarray(wanted.next_token)[before]
    )
    assert (np.asarray(found.n_accepted)[~before] >= at[~before]).all()
    next_token = np.asarray(found.next_token)
    assert ((next_token >= 0) & (next_token < 1000)).all()


@slow
@pytest.mark.parametrize("rule", RULES)
def test_wrong_answers_are_told_from_right_ones(rule):
    case = teeth_case(rule)
    check(case)
    for _, other in wrong(case):
        with pytest.raises(AssertionError):
            compare(case, by_kernel(other))


def test_the_least_index_wins():
    """Equal scores: exact, no near-tie about it."""
    case = make_case("coupled", kind="equal", temperature=1.0, top_k=1, top_p=1.0)
    assert (np.asarray(by_kernel(case).next_token) == 0).all()
    case = make_case("rejection", kind="equal", temperature=1.0, top_k=7, top_p=1.0)
    assert (np.asarray(by_kernel(case).next_token) < 7).all()


@slow
def test_a_batch_row_does_not_depend_on_others():
    case = make_case("rejection", seed=9)
    whole = by_kernel(case)
    for b in range(2):
        part = lambda x, b=b: x[b : b + 1]
        alone = case.replace(
            logits=part(case.logits),
            drafts=jax.tree.map(part, case.drafts),
            settings=jax.tree.map(part, case.settings),
            noise=jax.tree.map(part, case.noise),
        )
        found = by_kernel(alone)
        for x, y in zip(found, jax.tree.map(part, whole), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "rule", ["greedy", *(pytest.param(x, marks=slow) for x in RULES[1:])]
)
def test_without_races_in_the_tpu_interpreter(rule):
    """As the chip would: memory that was not written holds NaN, reads are checked."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    case = make_case(rule, batch=2, n_drafts=2, vocab=300, seed=1, temperature=1.0)
    try:
        check(case, interpret=params)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_refuses_what_it_cannot_hold():
    shape = lambda *x, dtype=jnp.float32: jax.ShapeDtypeStruct(x, dtype)
    ask = functools.partial(kernel_tpu.supports, n_drafts=7, rule="coupled")
    assert ask(shape(8, 8, 128256)) is None
    assert ask(shape(8, 8, 128256), rule="rejection", logprobs=shape(8, 7, 128256)) is (
        None
    )
    assert ask(shape(8, 8, 262144), rule="rejection", logprobs=shape(8, 7, 262144)) is (
        None
    )
    assert "VMEM" in (ask(shape(8, 64, 262144), n_drafts=63) or "")
    assert "float16" in (ask(shape(8, 8, 1000, dtype=jnp.float16)) or "")
    assert "vocabulary" in (ask(shape(8, 8, 256)) or "")
    assert "rule" in (ask(shape(8, 8, 1000), rule="block") or "")


def test_the_operation_chooses():
    case = make_case("rejection")
    given = (case.logits, case.drafts, case.settings, case.noise)
    found = verify_sample(*map(_arrays, given), rule="rejection")
    wanted = by_reference(case)
    np.testing.assert_array_equal(found.n_accepted, wanted.n_accepted)
    with pytest.raises(ValueError, match="not known"):
        verify_sample(*map(_arrays, given), rule="block")
    tree = case.drafts._replace(parents=case.drafts.tokens)
    with pytest.raises(ValueError, match="tree"):
        verify_sample(*map(_arrays, (given[0], tree, *given[2:])), rule="rejection")
    half = (jnp.asarray(case.logits, jnp.float16), *map(_arrays, given[1:]))
    with pytest.raises(ValueError, match="float16"):
        verify_sample(*half, rule="rejection", implementation="pallas_tpu")


def _arrays(tree):
    return jax.tree.map(jnp.asarray, tree)
