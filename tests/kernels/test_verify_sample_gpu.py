"""The GPU kernel of ``verify_sample`` in interpret mode against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_verify_sample_checks import (
    RULES,
    Tally,
    by_reference,
    compare,
    make_case,
    teeth_case,
    wrong,
)

from kernels_pallas.verify_sample import kernel_gpu
from specjax.ops.verify_sample import Decision


@functools.partial(jax.jit, static_argnames=("rule", "interpret"))
def run(logits, drafts, settings, noise, *, rule, interpret):
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
    found = kernel_gpu.verify_sample(*args, rule=rule, interpret=interpret, **given)
    return Decision(*found)


def by_kernel(case, interpret=None):
    given = (case.logits, case.drafts, case.settings, case.noise)
    interpret = interpret or plgpu.InterpretGPUParams()
    return jax.block_until_ready(run(*given, rule=case.rule, interpret=interpret))


def check(case, **kwargs):
    found, wanted = by_kernel(case, **kwargs), by_reference(case)
    np.testing.assert_allclose(
        found.log_normalizer, wanted.log_normalizer, rtol=1e-6, atol=1e-5
    )
    return compare(case, found, wanted)


@pytest.mark.parametrize("rule", RULES)
def test_decides_as_the_reference_but_for_near_ties(rule):
    tally = Tally()
    # The interpreter takes seconds for a row of the two-stage draw.
    size = {"batch": 1, "n_drafts": 1} if rule == "coupled" else {"batch": 3}
    for seed, kind in enumerate(["random", "ties", "banned"]):
        tally += check(make_case(rule, kind=kind, seed=seed, temperature=0.6, **size))
    assert tally["differ"] <= 0.05 * tally["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "rule"), [(300, "coupled"), (8193, "rejection"), (9000, "greedy")]
)
def test_other_sizes(vocab, rule):
    """Whole steps and parts; padded rows of the two-stage draw."""
    for seed, kind in enumerate(["random", "equal", "peaked"]):
        case = make_case(
            rule, batch=4, n_drafts=3, vocab=vocab, kind=kind, seed=seed, law=seed != 1
        )
        check(case)


@pytest.mark.slow
def test_wrong_answers_are_told_from_right_ones():
    case = teeth_case(RULES[0])
    check(case)
    for _, other in wrong(case):
        with pytest.raises(AssertionError):
            compare(case, by_kernel(other))


@pytest.mark.parametrize("rule", ["greedy", "rejection"])
def test_rows_without_a_law_are_reported(rule):
    case = make_case(rule, batch=3, n_drafts=2, seed=4, temperature=1.0)
    logits = case.logits.copy()
    logits[:, 1, 7] = np.nan
    found = by_kernel(case.replace(logits=logits))
    lost = np.isnan(np.asarray(found.log_normalizer))
    np.testing.assert_array_equal(lost, [[False, True, False]] * 3)
    assert (np.asarray(found.next_token) < 1000).all()


def test_refuses_what_it_cannot_take():
    shape = lambda *x, dtype=jnp.float32: jax.ShapeDtypeStruct(x, dtype)
    ask = functools.partial(kernel_gpu.supports, n_drafts=7, rule="coupled")
    assert ask(shape(8, 8, 128256)) is None
    assert "float16" in (ask(shape(8, 8, 1000, dtype=jnp.float16)) or "")
    assert "vocabulary" in (ask(shape(8, 8, 256)) or "")
    assert "rule" in (ask(shape(8, 8, 1000), rule="block") or "")
