"""Proofs on the embedded model, and at the sizes users have. Minutes, not seconds."""

import dataclasses

import jax
import numpy as np
import pytest

import specjax
from specjax import drafters, verify
from specjax.bench import WORKLOADS
from specjax.decode import Engine, Request
from specjax.testing import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ids_and_bits_do_not_depend_on_drafter_batch_or_width(dtype):
    model = specjax.load("smollm2-135m-instruct", dtype=dtype)
    prompts = [texts[0] for texts in WORKLOADS.values()] + [WORKLOADS["quoting"][2]]
    settings = dict(
        max_new_tokens=32,
        temperature=[0.0, 0.7, 1.0, 0.9],
        top_p=[1.0, 0.9, 1.0, 1.0],
        top_k=[0, 0, 50, 0],
        seed=[1, 2, 3, 4],
        exact=True,
    )
    together = specjax.generate(
        model, prompts, drafter=drafters.prompt_lookup(6), batch_size=4, **settings
    )
    assert together.stats.accepted > 20  # speculation did something
    plain = specjax.generate(model, prompts, drafter=None, batch_size=3, **settings)
    alone = specjax.generate(
        model, prompts, drafter=drafters.prompt_lookup(3), batch_size=1, **settings
    )
    for a, b, c in zip(together, plain, alone, strict=True):
        assert a.ids == b.ids == c.ids
        assert a.logprobs == b.logprobs == c.logprobs
    assert plain.stats.passes > together.stats.passes


def test_nothing_compiles_after_warm_up_over_200_prompts():
    model = tiny_model(max_context=2048)
    engine = Engine(
        model,
        drafter=drafters.prompt_lookup(4, min_ngram=1),
        rule=verify.coupled,
        batch_size=4,
        capacity=1200,
    )
    rng = np.random.default_rng(0)

    def request(i, length):
        return Request(
            prompt_ids=tuple(int(x) for x in rng.integers(0, 40, (length,))),
            id=i,
            max_new_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0.0, 0.5, 1.2])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            min_p=float(rng.choice([0.0, 0.1])),
            seed=int(rng.integers(0, 2**32)),
            stop=("zz",) if i % 3 else (),
            ignore_eos=bool(i % 2),
        )

    def finish(requests):
        return [e.completion for e in engine.run(requests) if e.completion]

    # Every prefill bucket once; a stop string, which releases a slot early.
    finish([request(0, 1 + 256 + 64 + 16 + 3)])
    engine._state = engine._programs.release(engine._state, np.int32(0))
    compiles = []
    count = lambda name, seconds, **_: compiles.append(name)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        requests = [
            request(i, int(n)) for i, n in enumerate(rng.integers(5, 1001, 200))
        ]
        # Some prompts come again, while they are in a slot and after.
        for i in (11, 90, 140):
            again = dataclasses.replace(requests[i], seed=i)
            requests[i + 1] = dataclasses.replace(again, id=i + 1)
        done = finish(requests)
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(done) == 200
    assert not [name for name in compiles if "backend_compile" in name]
