"""Lengths, limits and the edge of a slot."""

import dataclasses

import pytest
from decode_helpers import (
    CAPACITY,
    GAMMA,
    MODEL,
    VOCAB,
    assert_same,
    drain,
    logits_of,
    make_engine,
    mixed_requests,
    run,
    texts_of,
)

from specjax.decode import Request
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.testing import planted

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_lengths")

LOOKUP = BoundDrafter(prompt_lookup(GAMMA), None)


@pytest.mark.parametrize("name", ["right", "wrong", "partly_right", "hashed"])
def test_delivered_is_asked(name):
    """One token to eight with a gamma of four, right drafts beyond the limit."""
    request = dataclasses.replace(mixed_requests()[1], max_new_tokens=20)
    (plain,) = run([request])
    draft = getattr(planted, name)(GAMMA, VOCAB, texts_of([plain]))
    requests = [dataclasses.replace(request, max_new_tokens=n) for n in range(1, 9)]
    for n, completion in enumerate(run(requests, draft=draft), 1):
        assert completion.ids == plain.ids[:n]
        assert completion.logprobs == plain.logprobs[:n]
        assert completion.finish_reason == "length"
        assert len(completion.origins) == completion.stats.committed == n
        stats = completion.stats
        # No draft is verified that could not be delivered: gamma shrinks at the end.
        if name == "wrong":
            assert stats.verified == sum(min(GAMMA, left) for left in range(n))
        if name == "right":
            assert stats.passes == -(-n // (GAMMA + 1))
            assert stats.accepted == stats.verified == n - stats.passes


def test_a_slot_that_is_just_large_enough():
    """Prompt + new + gamma + 1 tokens fit; the slots around do not notice."""
    neighbours = mixed_requests()[:2]
    solo = run(neighbours)
    prompt = tuple(i % VOCAB for i in range(CAPACITY - 20 - GAMMA - 1))
    request = Request(prompt_ids=prompt, max_new_tokens=20, temperature=0.9, seed=3)
    (plain,) = run([request])
    draft = planted.partly_right(GAMMA, VOCAB, texts_of([plain, *solo]))
    got = run([neighbours[0], request, neighbours[1]], draft=draft)
    assert_same(got, [solo[0], plain, solo[1]])
    assert len(plain.ids) == 20

    engine = make_engine(draft=draft)
    for longer in (
        dataclasses.replace(request, prompt_ids=(*prompt, 1)),
        dataclasses.replace(request, max_new_tokens=21),
    ):
        with pytest.raises(ValueError, match=f"needs {CAPACITY + 1} cache slots") as e:
            engine.submit(longer)
        assert f"holds {CAPACITY}" in str(e.value)
        assert "raise capacity" in str(e.value)
    assert not engine.busy


def test_prompts_of_94_to_100_in_100_slots():
    engine = make_engine(draft=LOOKUP, capacity=100)
    refused = []
    for n in range(94, 101):
        for new in (1, 2, 3):
            request = Request(prompt_ids=(7, 8, 9) * 33 + (7,), max_new_tokens=new)
            request = dataclasses.replace(request, prompt_ids=request.prompt_ids[:n])
            try:
                engine.check(request)
            except ValueError as error:
                assert f"prompt {n}" in str(error)
                refused.append((n, new))
                continue
            (completion,) = drain(engine, [request])
            assert len(completion.ids) == new
            assert completion.finish_reason == "length"
    served = {(n, new) for n in range(94, 101) for new in (1, 2, 3)} - set(refused)
    assert served == {(94, 1)}


def test_a_prompt_of_one_token():
    request = Request(prompt_ids=(3,), max_new_tokens=6)
    (plain,) = run([request])
    (got,) = run([request], draft=LOOKUP)
    assert_same([got], [plain])
    assert len(got.ids) == 6


@pytest.mark.parametrize("n", [16, 17, 18, 64, 65, 66, 80, 81, 82])
def test_prompts_at_the_edges_of_prefill_chunks(n):
    """The chunks' padding is never seen: the end of a prompt scores as in one pass."""
    ids = tuple((i * i + 3) % VOCAB for i in range(n))
    (completion,) = run([Request(prompt_ids=ids, max_new_tokens=3)], draft=LOOKUP)
    logits = logits_of(MODEL, (*ids, *completion.ids))
    assert completion.ids == tuple(logits[n - 1 : n + 2].argmax(axis=1).tolist())
