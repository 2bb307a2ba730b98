"""Suffix matching in the whole loop: the text stays the same, nothing compiles."""

import jax
import pytest

import specjax
from specjax.drafters import build_datastore, extend_datastore, suffix
from specjax.testing import tiny_model

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("suffix_loop")

MODEL, GAMMA = tiny_model(), 4
PROMPTS = ["abcabc", "x", "the text", "aa bb aa", "0123401234"]
TEMPERATURES = [0.0, 0.7, 1.0, 0.0, 0.8]
DRAFTER = suffix(GAMMA, min_match=1)


def _generate(**settings):
    return specjax.generate(
        MODEL,
        PROMPTS,
        temperature=TEMPERATURES,
        top_p=0.9,
        seed=[1, 2, 3, 4, 5],
        max_new_tokens=40,
        exact=True,
        width=GAMMA + 1,
        batch_size=3,
        capacity=240,
        **settings,
    ).completions


@pytest.fixture(scope="module")
def plain():
    return _generate(drafter="plain")


def _assert_same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert (a.ids, a.logprobs, a.text) == (b.ids, b.logprobs, b.text)


def _store(completions):
    texts = [(*c.prompt_ids, *c.ids) for c in completions]
    return build_datastore(texts, size=1024)


def test_the_text_is_the_same_whatever_the_datastore_holds(plain):
    """Nothing, so that the rows' own texts are the source; or what misleads."""
    own = _generate(drafter=DRAFTER, draft_params=build_datastore([], size=1024))
    _assert_same(own, plain)
    assert sum(c.stats.accepted for c in own) > 20
    wrong = build_datastore([c.ids[::-1] for c in plain], size=1024)
    _assert_same(_generate(drafter=DRAFTER, draft_params=wrong), plain)


def test_its_own_outputs_are_drafted_again(plain):
    """All of them are known: a pass commits most of what it can."""
    known = _generate(drafter=DRAFTER, draft_params=_store(plain))
    _assert_same(known, plain)
    passes = sum(c.stats.passes for c in known)
    assert passes < sum(len(c.ids) for c in plain) / 2.5
    few = _generate(drafter=DRAFTER, draft_params=_store(plain[:1]))
    _assert_same(few, plain)
    assert passes < sum(c.stats.passes for c in few)


def test_another_content_compiles_nothing(plain):
    compiled = []

    def listener(event, duration, **facts):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(facts.get("fun_name"))

    store = build_datastore([], size=1024)
    _generate(drafter=DRAFTER, draft_params=store)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for completion in plain[:3]:
            store = extend_datastore(store, [completion.ids])
            _generate(drafter=DRAFTER, draft_params=store)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert compiled == []
