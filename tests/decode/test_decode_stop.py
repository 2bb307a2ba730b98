"""Stop ids, end ids and stop strings, also in the middle of an accepted block."""

import dataclasses

import pytest
from decode_helpers import (
    GAMMA,
    MODEL,
    VOCAB,
    assert_same,
    drain,
    make_engine,
    run,
    texts_of,
)

from specjax.decode import Origin, Request, Status
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.testing import planted

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_stop")

LOOKUP = BoundDrafter(prompt_lookup(GAMMA), None)
REQUEST = Request(
    prompt_ids=tuple(MODEL.tokenizer.encode("stop here")),
    max_new_tokens=40,
    temperature=1.0,
    top_k=60,
    seed=12,
)


@pytest.fixture(scope="module")
def plain():
    (completion,) = run([REQUEST])
    assert len(set(completion.ids[:8])) == 8  # the tests below stop at some of them
    return completion


@pytest.fixture(scope="module")
def right(plain):
    return planted.right(GAMMA, VOCAB, texts_of([plain]))


@pytest.mark.parametrize("by", ["request", "model"])
def test_a_stop_id_inside_the_block(plain, right, by):
    """[10, 11, STOP, 20, 21, 22] with a cap of 5 is three tokens, reason stop."""
    stop = plain.ids[2]
    request = dataclasses.replace(REQUEST, max_new_tokens=5)
    model = MODEL
    if by == "model":
        model = dataclasses.replace(MODEL, eos_ids=(stop, 999 % VOCAB))
    else:
        request = dataclasses.replace(request, stop_ids=(stop,))
    for draft in (right, LOOKUP, planted.silent(GAMMA, VOCAB)):
        (got,) = run([request], model=model, draft=draft)
        assert got.ids == plain.ids[:3] and got.finish_reason == "stop"
        assert got.logprobs == plain.logprobs[:3]
        assert got.text == MODEL.tokenizer.decode(got.ids)
    (got,) = run([request], model=model, draft=right)
    # One pass: four drafts scored and kept by the rule, three tokens committed, the
    # rest of the block dropped with its bonus.
    assert got.origins == (Origin.ACCEPTED,) * 3
    assert (got.stats.passes, got.stats.verified) == (1, 4)
    assert (got.stats.accepted, got.stats.committed) == (4, 3)


def test_a_stop_id_beyond_the_cap(plain, right):
    request = dataclasses.replace(REQUEST, max_new_tokens=5, stop_ids=(plain.ids[6],))
    (got,) = run([request], draft=right)
    assert got.ids == plain.ids[:5] and got.finish_reason == "length"


def test_a_stop_id_that_is_the_last_token_allowed(plain, right):
    request = dataclasses.replace(REQUEST, max_new_tokens=5, stop_ids=(plain.ids[4],))
    (got,) = run([request], draft=right)
    assert got.ids == plain.ids[:5] and got.finish_reason == "stop"


def test_a_stop_id_as_the_bonus_and_as_the_correction(plain, right):
    request = dataclasses.replace(REQUEST, stop_ids=(plain.ids[4],))
    (got,) = run([request], draft=right)
    assert got.ids == plain.ids[:5] and got.finish_reason == "stop"
    assert got.origins[-1] == Origin.BONUS
    wrong = planted.wrong(GAMMA, VOCAB, texts_of([plain]))
    (got,) = run([request], draft=wrong)
    assert got.ids == plain.ids[:5] and got.finish_reason == "stop"
    assert got.origins == (Origin.CORRECTION,) * 5


def test_a_stop_id_in_the_prompt_or_in_a_rejected_draft_stops_nothing(plain):
    one_off = (plain.ids[0] + 1) % VOCAB
    stops = (one_off, REQUEST.prompt_ids[0])
    assert not set(stops) & set(plain.ids[:9])
    request = dataclasses.replace(REQUEST, stop_ids=stops, max_new_tokens=9)
    wrong = planted.wrong(GAMMA, VOCAB, texts_of([plain]))
    (got,) = run([request], draft=wrong)
    assert got.ids == plain.ids[:9] and got.finish_reason == "length"


def test_ignore_eos_and_no_eos(plain, right):
    model = dataclasses.replace(MODEL, eos_ids=(plain.ids[3],))
    (got,) = run([REQUEST], model=model, draft=right)
    assert got.ids == plain.ids[:4]
    (got,) = run(
        [dataclasses.replace(REQUEST, ignore_eos=True)], model=model, draft=right
    )
    assert_same([got], [plain])
    assert MODEL.eos_ids == ()
    repeated = dataclasses.replace(REQUEST, prompt_ids=(5, 6, 7) * 9)
    assert_same(run([repeated], draft=LOOKUP), run([repeated]))


def test_rows_stop_apart(plain, right):
    requests = [
        dataclasses.replace(REQUEST, stop_ids=(plain.ids[i],)) for i in (0, 3, 5, 7)
    ]
    got = run([*requests, REQUEST], draft=right)
    assert [len(c.ids) for c in got] == [1, 4, 6, 8, len(plain.ids)]
    assert all(c.ids == plain.ids[: len(c.ids)] for c in got)


def _printable(text):
    """A piece of a text that has no replaced bytes."""
    return next(
        text[i : i + 3]
        for i in range(4, len(text))
        if "\ufffd" not in text[i : i + 3] and text.find(text[i : i + 3]) == i
    )


def test_a_stop_string_inside_a_block(plain, right):
    """Text, ids, log-probabilities and origins are trimmed alike, as in plain."""
    stop = _printable(plain.text)
    request = dataclasses.replace(REQUEST, stop=(stop, "never there"))
    (off,) = run([request])
    assert off.finish_reason == "stop"
    assert off.text == plain.text[: plain.text.index(stop)]
    assert off.ids == plain.ids[: len(off.ids)]
    assert MODEL.tokenizer.decode(off.ids).startswith(off.text)
    assert len(off.ids) < len(plain.ids)
    for passes in (2, 16):  # the stop string is cut by the returns to the host
        (on,) = run([request], draft=right, passes=passes)
        assert_same([on], [off])
        assert len(on.ids) == len(on.logprobs) == len(on.origins)
        assert set(on.origins) <= {Origin.ACCEPTED, Origin.BONUS}
        assert on.stats.committed >= len(on.ids)


def test_a_slot_is_free_after_a_stop_string(plain, right):
    """The device still runs the row: the host releases it, and another comes in."""
    request = dataclasses.replace(REQUEST, stop=(_printable(plain.text),))
    engine = make_engine(draft=right, passes=2)
    got = drain(engine, [request] * 7 + [REQUEST])
    assert_same(got, [got[0]] * 7 + [plain])
    assert not engine.busy
    assert Status.RUNNING not in engine._state.status.tolist()


def test_a_stop_string_over_the_end_of_the_text_is_not_held_back(plain, right):
    """What could have begun a stop string is text when the row ends."""
    stop = plain.text[-2:] + "and more"
    request = dataclasses.replace(REQUEST, stop=(stop,))
    assert_same(run([request], draft=right), [plain])


def test_events_give_the_text_once(plain, right):
    stop = _printable(plain.text)
    for request, wanted in (
        (REQUEST, plain.text),
        (dataclasses.replace(REQUEST, stop=(stop,)), plain.text.split(stop)[0]),
    ):
        engine = make_engine(draft=right, passes=2)
        events = list(engine.run([request]))
        assert "".join(event.text for event in events) == wanted
        assert [e.completion is None for e in events[:-1]] == [True] * (len(events) - 1)
        assert events[-1].completion.text == wanted
        assert sum(e.n_new for e in events) == events[-1].completion.stats.committed
