"""Prompt lookup against a reference that a reader can check."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import drafters
from specjax.drafters import DraftContext, prompt_lookup
from specjax.sampling import Settings

SIZE = 40  # of the history buffer; one shape, so one compilation a configuration
CONFIGS = [(4, 2, 8), (4, 1, 3), (1, 2, 2), (7, 3, 5), (3, 1, 1), (2, 2, 60)]


def reference(history, gamma, min_ngram, max_ngram):
    """Longest suffix that occurred before, most recent occurrence, periodic."""
    length = len(history)
    for n in range(min(max_ngram, length - 1), min_ngram - 1, -1):
        suffix = history[length - n :]
        for start in range(length - n - 1, -1, -1):
            if history[start : start + n] == suffix:
                follows = history[start + n :]
                return [follows[i % len(follows)] for i in range(gamma)]
    return []


@functools.cache
def _compiled(config):
    gamma, least, most = config
    drafter = prompt_lookup(gamma, min_ngram=least, max_ngram=most)

    @jax.jit
    def propose(history, length):
        context = DraftContext(
            history=history[None],
            length=length[None],
            settings=Settings.full(1),
            features=None,
            n_new=length[None],
        )
        proposal, _ = drafter.propose(None, (), context)
        return proposal.tokens[0], proposal.n_valid[0]

    return propose


def draft(history, config, junk=0):
    buffer = np.full((SIZE,), junk, np.int32)
    buffer[: len(history)] = history
    tokens, n = _compiled(config)(buffer, np.int32(len(history)))
    return np.asarray(tokens)[: int(n)].tolist()


@pytest.mark.parametrize("config", CONFIGS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_equals_the_reference(config, data):
    n_letters = data.draw(st.integers(1, 4))
    letters = st.integers(0, n_letters - 1)
    history = data.draw(st.lists(letters, min_size=1, max_size=SIZE))
    # What lies beyond the length would continue the matches.
    junk = data.draw(st.sampled_from([0, 1, -1]))
    assert draft(history, config, junk) == reference(history, *config)


def test_the_longest_match_wins_over_a_more_recent_one():
    history = [1, 2, 3, 4, 9, 9, 3, 4, 8, 8, 2, 3, 4]
    assert draft(history, (2, 2, 8)) == [9, 9]  # after 2 3 4, not after 3 4
    assert draft(history, (2, 2, 2)) == [8, 8]  # with 2 at most, the most recent


def test_the_most_recent_of_equally_long_matches_wins():
    assert draft([5, 6, 1, 5, 6, 2, 5, 6], (1, 2, 2)) == [2]


def test_a_match_shorter_than_min_ngram_is_none():
    assert draft([1, 2, 7, 3, 2], (4, 2, 8)) == []
    assert draft([1, 2, 7, 3, 2], (4, 1, 3)) == [7, 3, 2, 7]


def test_a_repetition_goes_on_periodically():
    assert draft([1, 2, 3, 1, 2, 3, 1, 2], (7, 3, 5)) == [3, 1, 2, 3, 1, 2, 3]
    assert draft([4, 4, 4], (4, 2, 8)) == [4, 4, 4, 4]


def test_the_match_may_straddle_prompt_and_output():
    """Nothing tells the drafter where the prompt ended."""
    prompt, output = [7, 8, 1, 2], [3, 9, 5, 2, 3]
    assert draft(prompt + output, (2, 2, 8)) == [9, 5]


@pytest.mark.parametrize("history", [[3], [3, 3], [3, 4], []])
def test_short_histories(history):
    for config in CONFIGS:
        assert draft(history, config) == reference(history, *config)


@pytest.mark.parametrize("gamma", [0, -1, True, 1.5, "4", None])
def test_gamma_is_checked(gamma):
    with pytest.raises(ValueError, match=r"gamma=.*whole number >= 1"):
        prompt_lookup(gamma)
    with pytest.raises(ValueError, match=r"gamma=.*whole number >= 1"):
        drafters.by_name("prompt_lookup", gamma)


@pytest.mark.parametrize(("least", "most"), [(0, 3), (-1, 3), (4, 3), (1, 0)])
def test_ngram_lengths_are_checked(least, most):
    with pytest.raises(ValueError, match="1 <= min_ngram <= max_ngram") as error:
        prompt_lookup(4, min_ngram=least, max_ngram=most)
    assert f"min_ngram={least}" in str(error.value)


def test_an_unknown_drafter_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="known drafters: lookahead, plain") as e:
        drafters.by_name("eagle9", 4)
    assert "eagle9" in str(e.value)


def test_it_proposes_point_masses():
    drafter = prompt_lookup(3)
    context = DraftContext(
        history=jnp.zeros((1, 8), jnp.int32),
        length=jnp.full((1,), 4, jnp.int32),
        settings=Settings.full(1),
        features=None,
        n_new=jnp.full((1,), 1, jnp.int32),
    )
    assert drafter.propose(None, (), context)[0].logprobs is None
    assert drafter.spec.gamma == 3 and not drafter.spec.needs_features
