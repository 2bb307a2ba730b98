"""Each row of a batch is what it is alone."""

import dataclasses

import pytest
from decode_helpers import (
    GAMMA,
    MODEL,
    VOCAB,
    assert_same,
    drain,
    make_engine,
    mixed_requests,
    run,
    texts_of,
)

from specjax.decode import Request
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.testing import planted, tiny_model

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_rows")

LOOKUP = BoundDrafter(prompt_lookup(GAMMA), None)


@pytest.fixture(scope="module")
def alone():
    """Each request in an engine of its own, one slot of three in use."""
    requests = mixed_requests()
    return requests, [run([r], draft=LOOKUP)[0] for r in requests]


def test_in_a_batch_as_alone(alone):
    requests, solo = alone
    assert_same(run(requests, draft=LOOKUP), solo)


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 3, 4]])
def test_order_of_submission_changes_nothing(alone, order):
    """Also not who the neighbours are, and who takes whose slot."""
    requests, solo = alone
    got = run([requests[i] for i in order], draft=LOOKUP)
    assert_same(got, [solo[i] for i in order])


def test_batch_of_one(alone):
    requests, solo = alone
    assert_same(run(requests, batch=1, width=1), solo)


def test_an_engine_that_served_others_is_as_a_new_one(alone):
    """Refills at other times, and requests that come while others run."""
    requests, solo = alone
    engine = make_engine(draft=LOOKUP, passes=2)
    done = {}
    waiting = list(enumerate(requests * 2))
    while waiting or engine.busy:
        if waiting:
            i, request = waiting.pop()
            engine.submit(dataclasses.replace(request, id=i))
        for event in engine.step():
            if event.completion is not None:
                done[event.id] = event.completion
    assert_same([done[i] for i in range(len(done))], solo * 2)
    assert len(done) == 2 * len(requests)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [3, 5, 1, 0, 4, 2]])
def test_rejection_rows_are_independent_too(order):
    requests = mixed_requests()
    known = texts_of(run(requests))
    draft = planted.partly_right(GAMMA, VOCAB, known)
    engine = lambda: make_engine(draft=draft, rule="rejection")
    solo = [drain(engine(), [r])[0] for r in requests]
    got = drain(engine(), [requests[i] for i in order])
    assert_same(got, [solo[i] for i in order])


def test_seeds_1_and_2_at_temperature_0():
    prompts = [tuple(MODEL.tokenizer.encode(t)) for t in ("one row", "another one")]
    requests = [
        Request(prompt_ids=prompt, seed=seed, max_new_tokens=30)
        for seed, prompt in enumerate(prompts, 1)
    ]
    both = run(requests, draft=LOOKUP)
    assert_same(both, [run([r], draft=LOOKUP)[0] for r in requests])
    again = [dataclasses.replace(r, seed=9) for r in requests]
    assert_same(run(again, draft=LOOKUP), both)


def test_equal_requests_are_equal_and_other_seeds_differ():
    request = mixed_requests()[5]
    other = dataclasses.replace(request, seed=77)
    a, b, c = run([request, request, other], draft=LOOKUP)
    assert a.ids == b.ids != c.ids


def test_another_model_of_the_same_shape_shares_the_programs():
    """Parameters are arguments: nothing of them is baked into a program."""
    request = mixed_requests()[0]
    one, other = tiny_model(0), tiny_model(1)
    first = run([request], model=one)
    assert run([request], model=other)[0].ids != first[0].ids
    assert_same(run([request], model=one), first)


def test_rows_may_do_without_drafts_or_with_few():
    prompt = (1, 2, 3, 1, 2, 3, 1, 2)
    requests = [
        Request(prompt_ids=prompt, max_new_tokens=24, ignore_eos=True, max_drafts=most)
        for most in (None, 0, 1, GAMMA)
    ]
    done = run(requests, draft=LOOKUP)
    assert len({c.ids for c in done}) == 1
    whole, none, one, full = (c.stats for c in done)
    assert none.verified == 0 and none.passes == 24
    assert 0 < one.verified <= one.passes and whole == full
    assert whole.verified > one.verified
    with pytest.raises(ValueError, match="max_drafts=-1"):
        Request(prompt_ids=prompt, max_drafts=-1)
