"""Bad input: refused before any work, with the value and the way out."""

import dataclasses
import math

import numpy as np
import pytest
from decode_helpers import GAMMA, MODEL, PLAIN, VOCAB, make_engine

import specjax
from specjax.decode import Engine, Plan, Request
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.verify import coupled

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_errors")

LOOKUP = BoundDrafter(prompt_lookup(GAMMA), None)


def _refused(match, prompts="abc", **settings):
    """The call is refused by ``generate``, and by the call of ``stream`` itself."""
    with pytest.raises(ValueError, match=match):
        specjax.generate(MODEL, prompts, **settings)
    if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        one = {k: v for k, v in settings.items() if k != "batch_size"}
        with pytest.raises(ValueError, match=match):
            specjax.stream(MODEL, prompts, **one)


@pytest.mark.parametrize("prompt", ["", [], (), np.zeros((0,), np.int32)])
def test_empty_prompts(prompt):
    with pytest.raises(ValueError, match="empty.* at least one"):
        specjax.generate(MODEL, prompt)
    with pytest.raises(ValueError, match="empty.* at least one"):
        specjax.stream(MODEL, prompt)
    with pytest.raises(ValueError, match="empty.* at least one"):
        specjax.generate(MODEL, ["fine", prompt])


def test_an_empty_list_of_ids_in_a_request():
    with pytest.raises(ValueError, match="empty.* at least one"):
        Request(prompt_ids=())


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**31, 2**40])
def test_ids_outside_the_vocabulary(bad):
    _refused(rf"prompt_ids holds {bad}, outside the vocabulary \[0, 256\)", [1, bad, 3])
    engine = make_engine()
    with pytest.raises(ValueError, match=f"stop_ids holds {bad}, outside"):
        engine.submit(Request(prompt_ids=(1,), stop_ids=(2, bad)))


@pytest.mark.parametrize("bad", [0, -3, True, 1.5, math.nan, math.inf])
def test_max_new_tokens(bad):
    _refused(
        rf"max_new_tokens={bad} must be a whole number in \[1,", max_new_tokens=bad
    )


@pytest.mark.parametrize("bad", [-1, -0.1, math.nan, math.inf, -math.inf])
def test_temperature(bad):
    _refused(rf"temperature={bad} must be a finite number >= 0", temperature=bad)


@pytest.mark.parametrize("bad", [1e-5, 1e-45, 1e5])
def test_temperatures_that_leave_float32(bad):
    _refused(rf"temperature={bad} must be 0 or in \[0.0001, 10000", temperature=bad)


@pytest.mark.parametrize("bad", [0, 1.1, -0.5, math.nan])
def test_top_p(bad):
    _refused(rf"top_p={bad} must be in \(0, 1\] \(1 is off\)", top_p=bad)


@pytest.mark.parametrize("bad", [1, -0.5, 1.5, math.nan])
def test_min_p(bad):
    _refused(rf"min_p={bad} must be in \[0, 1\) \(0 is off\)", min_p=bad)


@pytest.mark.parametrize("bad", [-1, 2.5, True, 2**31, math.inf, math.nan])
def test_top_k(bad):
    _refused(rf"top_k={bad} must be a whole number", top_k=bad)


@pytest.mark.parametrize("bad", [-1, 2**32, 0.5, True, math.inf, math.nan])
def test_seed(bad):
    _refused(rf"seed={bad} must be a whole number", seed=bad)


@pytest.mark.parametrize("bad", [-1, 0, 2.5, True])
def test_gamma(bad):
    _refused(rf"gamma={bad} must be a whole number >= 1", gamma=bad)


def test_a_negative_gamma_for_plain_decoding():
    _refused(r"gamma=-1 must be a whole number >= 0", drafter="plain", gamma=-1)


def test_unknown_names_list_the_known_ones():
    _refused(
        r"'medusa' is not known; known drafters: lookahead, plain", drafter="medusa"
    )
    _refused(
        r"'nucleus' is not known; known rules: block, coupled, greedy", rule="nucleus"
    )


def test_the_greedy_rule_samples_nothing():
    _refused(
        r"'greedy' decodes at temperature 0; got temperature=0.5. Use 'coupled' or",
        rule="greedy",
        temperature=0.5,
    )


def test_width_needs_exact_and_room_for_the_drafts():
    _refused(r"width=8 only means something with exact=True", width=8)
    _refused(r"3 rows cannot verify gamma=6.*at least 7", width=3, exact=True)
    for width in (0, -2):
        _refused(r"width", width=width, exact=True)


@pytest.mark.parametrize("widths", [(), (5, 1), (1, 1, 5), (0, 5)])
def test_widths_of_a_plan(widths):
    with pytest.raises(ValueError, match="widths="):
        Plan(
            target=MODEL.target,
            drafter=LOOKUP.drafter,
            rule=coupled,
            batch=1,
            capacity=100,
            widths=widths,
        )


def test_capacity_beyond_the_context():
    _refused(r"capacity=513 is more than the 512 positions.*lower it", capacity=513)


def test_capacity_below_the_need():
    _refused(
        r"needs 138 cache slots .*holds 100. Shorten the prompt.*raise capacity",
        capacity=100,
    )


@pytest.mark.parametrize("bad", [0, -1])
def test_sizes_below_one(bad):
    with pytest.raises(ValueError, match="batch_size"):
        make_engine(batch=bad)
    with pytest.raises(ValueError, match="passes_per_call"):
        make_engine(passes=bad)
    with pytest.raises(ValueError, match="capacity"):
        make_engine(capacity=bad)
    with pytest.raises(ValueError, match="batch_size"):
        specjax.generate(MODEL, "abc", batch_size=bad)


def test_a_prompt_that_fits_no_slot():
    _refused(r"prompt 500 \+ max_new_tokens 128.*a row holds 512", [1] * 500)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "seed"])
def test_as_many_values_as_prompts(name):
    with pytest.raises(ValueError, match=f"{name} has 3 values for 2 prompts"):
        specjax.generate(MODEL, ["a", "b"], **{name: [1, 1, 1]})
    with pytest.raises(ValueError, match=f"{name} has 1 values for 2 prompts"):
        specjax.generate(MODEL, ["a", "b"], **{name: np.ones((1,))})


def test_too_many_stop_ids():
    model = dataclasses.replace(MODEL, eos_ids=(1, 2))
    engine = make_engine(model=model)
    engine.check(Request(prompt_ids=(1,), stop_ids=(2, 3, 4, 5, 6, 7, 8)))
    with pytest.raises(ValueError, match="9 stop ids do not fit n_stop_ids=8"):
        engine.submit(Request(prompt_ids=(1,), stop_ids=(3, 4, 5, 6, 7, 8, 9)))


def test_an_empty_stop_string():
    """Refused by the call, not when the request's turn comes."""
    _refused("stop string is empty", stop=[""])
    _refused("stop string is empty", stop=["fine", ""])


def test_an_empty_stop_string_in_a_request_does_not_break_the_engine():
    engine = make_engine()
    with pytest.raises(ValueError, match="stop string is empty"):
        engine.submit(Request(prompt_ids=(1,), stop=("",)))
    assert not engine.busy


@pytest.mark.parametrize("call", [specjax.generate, specjax.stream])
def test_one_string_as_stop_is_not_taken_for_its_letters(call):
    with pytest.raises(TypeError, match=r"list of strings.*\['END'\]"):
        call(MODEL, "abc", stop="END", max_new_tokens=2)


@pytest.mark.parametrize("bad", [[1.5, 2.0], [1, 2.5], np.ones((3,))])
def test_ids_that_are_no_integers_are_not_rounded(bad):
    with pytest.raises((ValueError, TypeError), match="whole numbers"):
        specjax.generate(MODEL, [bad], max_new_tokens=1)


def test_a_chat_needs_a_template():
    message = [{"role": "user", "content": "hi"}]
    _refused("no chat template; pass the prompt as text with chat=False", [message])
    _refused("no chat template", "hi", chat=True)


def test_a_model_without_a_tokenizer_decodes_no_text():
    model = dataclasses.replace(MODEL, tokenizer=None)
    with pytest.raises(ValueError, match="without a tokenizer; load it with one"):
        specjax.generate(model, "abc")
    with pytest.raises(ValueError, match="without a tokenizer; load it with one"):
        specjax.stream(model, [1, 2])


def test_nothing_is_generated_when_one_of_several_is_bad():
    engine = Engine.step
    calls = []
    try:
        Engine.step = lambda self: calls.append(1) or engine(self)
        with pytest.raises(ValueError, match="top_p=2"):
            specjax.generate(MODEL, ["a", "b"], top_p=[1, 2])
        with pytest.raises(ValueError, match="outside the vocabulary"):
            specjax.generate(MODEL, [[1], [VOCAB]])
    finally:
        Engine.step = engine
    assert calls == []


def test_drafts_over_another_vocabulary():
    import jax.numpy as jnp

    from specjax.testing import planted

    draft = planted.sampled(GAMMA, jnp.log(jnp.full((7, 7), 1 / 7)))
    engine = make_engine(draft=draft, rule="rejection", batch=1)
    engine.submit(Request(prompt_ids=(1, 2), temperature=1.0))
    with pytest.raises(ValueError, match="vocabulary has 7 entries, the target's 256"):
        engine.step()
    assert PLAIN.params is None
