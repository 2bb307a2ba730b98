"""Logits that are no numbers, ties, and extreme settings."""

import dataclasses

import pytest
from decode_helpers import (
    GAMMA,
    MODEL,
    VOCAB,
    assert_same,
    mixed_requests,
    run,
    texts_of,
)

from specjax.decode import Request
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.testing import planted

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_numerics")

LOOKUP = BoundDrafter(prompt_lookup(GAMMA), None)
AT = 45  # the position whose logits are NaN
NAN_AT = dataclasses.replace(
    MODEL, target=planted.nan_target(MODEL.target, positions=(AT,))
)


def _requests():
    """One row that passes the position and three that never predict it."""
    mixed = mixed_requests()
    passes = dataclasses.replace(mixed[1], prompt_ids=mixed[5].prompt_ids[:37])
    before = dataclasses.replace(mixed[2], max_new_tokens=AT - 1)
    return [passes, before, mixed[3]]


@pytest.fixture(scope="module")
def sound():
    return run(_requests())


@pytest.mark.parametrize("name", ["right", "partly_right", "silent"])
def test_a_nan_row_ends_with_an_error_and_others_do_not_notice(sound, name):
    draft = getattr(planted, name)(GAMMA, VOCAB, texts_of(sound))
    got = run(_requests(), model=NAN_AT, draft=draft)
    assert_same(got[1:], sound[1:])
    bad, good = got[0], sound[0]
    n = AT - 37
    assert bad.finish_reason == "error"
    assert f"position {AT}" in bad.error and f"token {n} " in bad.error
    assert bad.ids == good.ids[:n] and bad.logprobs == good.logprobs[:n]
    assert bad.text == MODEL.tokenizer.decode(bad.ids)
    assert bad.stats.committed == n


def test_a_nan_at_the_first_token(sound):
    request = dataclasses.replace(_requests()[0], prompt_ids=tuple(range(AT)))
    (got,) = run([request], model=NAN_AT)
    assert (got.ids, got.text, got.finish_reason) == ((), "", "error")
    assert f"position {AT}" in got.error


def test_a_slot_serves_again_after_an_error(sound):
    requests = _requests()
    got = run([requests[0], requests[0], *requests[1:], requests[0]], model=NAN_AT)
    assert_same(got[2:4], sound[1:])
    assert [c.finish_reason == "error" for c in got] == [True, True, False, False, True]


def test_a_nan_beyond_a_stop_id_or_the_limit_is_ignored(sound):
    """Rows of padding and drafts behind the end are computed and not used."""
    draft = planted.right(GAMMA, VOCAB, texts_of(sound))
    request, ids = _requests()[0], sound[0].ids
    n = AT - 37
    limited = dataclasses.replace(request, max_new_tokens=n)
    (got,) = run([limited], model=NAN_AT, draft=draft)
    assert (got.ids, got.finish_reason) == (ids[:n], "length")
    assert ids[n - 1] not in ids[: n - 1]
    stopped = dataclasses.replace(request, stop_ids=(ids[n - 1],))
    (got,) = run([stopped], model=NAN_AT, draft=draft)
    assert (got.ids, got.finish_reason) == (ids[:n], "stop")


def test_a_nan_after_a_rejected_draft_is_ignored(sound):
    """The draft proposes an id after which the target has no numbers."""
    used = {i for r, c in zip(_requests(), sound, strict=True) for i in c.ids}
    used |= {i for r in _requests() for i in r.prompt_ids}
    poison = next(i for i in range(VOCAB) if i not in used)
    target = planted.nan_target(MODEL.target, tokens=(poison,))
    model = dataclasses.replace(MODEL, target=target)
    draft = planted.constant(GAMMA, VOCAB, [poison] * GAMMA)
    got = run(_requests(), model=model, draft=draft)
    assert_same(got, sound)
    assert all(c.stats.verified > 0 == c.stats.accepted for c in got)


TIED = (90, 17, 200)


@pytest.fixture(scope="module")
def tied():
    return dataclasses.replace(MODEL, target=planted.tie_target(MODEL.target, TIED))


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_ties_go_to_the_lowest_id_at_temperature_0(tied, rule):
    """Alone and next to rows that sample, whichever of the tied ids is drafted."""
    requests = [Request(prompt_ids=(1, 2, 3), max_new_tokens=9)]
    if rule != "greedy":
        requests.append(dataclasses.replace(requests[0], temperature=0.7, seed=1))
    draft = planted.constant(GAMMA, VOCAB, [17, 17, 90, 17])
    for some in (requests[:1], requests):
        got = run(some, model=tied, draft=draft, rule=rule)
        assert got[0].ids == (17,) * 9
        assert got[0].stats.accepted_at[1] > 0 == got[0].stats.accepted_at[2]


def test_ties_are_broken_alike_by_the_filters(tied):
    """top_k=1 and a small top_p keep the lowest of the tied ids."""
    base = Request(prompt_ids=(4, 5), max_new_tokens=9, temperature=1.0, seed=3)
    draft = planted.constant(GAMMA, VOCAB, [17, 90, 17, 17])
    requests = [
        dataclasses.replace(base, top_k=1),
        dataclasses.replace(base, top_p=1e-6),
        dataclasses.replace(base, top_k=2),
    ]
    got = run(requests, model=tied, draft=draft)
    assert got[0].ids == got[1].ids == (17,) * 9
    assert set(got[2].ids) == {17, 90}


def test_the_least_temperature_is_greedy():
    request = mixed_requests()[0]
    got = run([dataclasses.replace(request, temperature=1e-4)])
    assert_same(got, run([request]))


def test_the_largest_temperature_is_uniform():
    requests = [
        Request(prompt_ids=(1,), max_new_tokens=200, temperature=1e4, seed=seed)
        for seed in range(3)
    ]
    got = run(requests)
    assert all(c.finish_reason == "length" for c in got)
    # 600 draws of 256 ids: 231 different ones are expected, give or take 4.
    assert 210 < len({i for c in got for i in c.ids}) < 252


def test_top_k_beyond_the_vocabulary_is_off():
    request = mixed_requests()[5]
    off, on = run([request, dataclasses.replace(request, top_k=2**31 - 1)])
    assert_same([on], [off])
