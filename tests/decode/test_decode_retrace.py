"""What compiles, and what does not."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from decode_helpers import CAPACITY, GAMMA, MODEL, VOCAB, make_engine

import specjax
from specjax.decode import Plan, Request, programs
from specjax.drafters import BoundDrafter, plain, prompt_lookup
from specjax.testing import tiny_model
from specjax.verify import coupled

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_retrace")

_COMPILED = []


@pytest.fixture(scope="module", autouse=True)
def _listen():
    """Counts the backend's compilations, cached ones included."""

    def listener(event, duration, **facts):
        if event == "/jax/core/compile/backend_compile_duration":
            _COMPILED.append(facts.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield
    jax.monitoring.unregister_event_duration_listener(listener)


@contextlib.contextmanager
def compilations():
    """Gives a list that holds, at the end, what was compiled inside."""
    found, before = [], len(_COMPILED)
    yield found
    found += _COMPILED[before:]


def _generate(prompts, **settings):
    """``generate`` at the sizes that other tests compile."""
    fixed = dict(gamma=GAMMA, exact=True, batch_size=3, capacity=CAPACITY)
    fixed["max_new_tokens"] = 40
    return specjax.generate(MODEL, prompts, **(fixed | settings))


def test_no_prompt_length_or_setting_compiles():
    rng = np.random.default_rng(0)
    prompt = lambda n: rng.integers(0, VOCAB, n).tolist()
    # Both prefill sizes, both branches of the rule, a stop string, a refill.
    _generate([prompt(120), prompt(1), prompt(2), prompt(3)], temperature=[0, 1, 0, 1])
    _generate([1, 2], stop=[_generate([1, 2]).texts[0][3:5]])
    with compilations() as found:
        for n in range(2, 121, 3):
            for temperature, extra in ((0.0, {}), (0.9, {"top_p": 0.9, "top_k": n})):
                _generate(
                    prompt(n),
                    temperature=temperature,
                    min_p=0.01,
                    seed=n,
                    max_new_tokens=1 + n % 40,
                    stop=["ab", "c"][: n % 3],
                    **extra,
                )
        _generate([prompt(n) for n in range(2, 12)], temperature=0.5)
        _generate("text instead of ids", max_new_tokens=np.int64(9), seed=np.uint32(7))
    assert found == []


def test_another_model_stop_ids_and_end_ids_compile_nothing():
    first, *rest = (
        dataclasses.replace(tiny_model(seed), eos_ids=(seed,) * seed)
        for seed in range(3)
    )
    specjax.generate(first, "warm", gamma=GAMMA, exact=True, batch_size=3)
    with compilations() as found:
        for model in rest:
            engine = make_engine(
                model=model, draft=BoundDrafter(prompt_lookup(GAMMA), None)
            )
            requests = [
                Request(prompt_ids=(1, 2, 3), stop_ids=tuple(range(n)), id=n)
                for n in range(5)
            ]
            assert len([e for e in engine.run(requests) if e.completion]) == 5
    assert [name for name in found if "init" not in name and "key" not in name] == []


def test_another_gamma_compiles_once():
    run = lambda gamma: _generate("abc", gamma=gamma, max_new_tokens=4)
    run(GAMMA)
    with compilations() as found:
        run(3)
    assert sum("_run" in name for name in found) == 1
    with compilations() as found:
        run(3)
        run(GAMMA)
    assert found == []


def test_equal_plans_share_programs():
    plan = lambda: Plan(
        target=tiny_model(5).target,
        drafter=prompt_lookup(GAMMA),
        rule=coupled,
        batch=3,
        capacity=CAPACITY,
        widths=(1, GAMMA + 1),
    )
    assert plan() == plan() and hash(plan()) == hash(plan())
    assert programs(plan(), 4) is programs(plan(), 4)
    other = dataclasses.replace(plan(), drafter=plain())
    assert programs(other, 4) is not programs(plan(), 4)
