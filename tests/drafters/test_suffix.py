"""Suffix matching against a reference that a reader can check."""

import collections
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import drafters
from specjax.drafters import DraftContext, build_datastore, suffix
from specjax.sampling import Settings

SIZE, STORE = 40, 128  # of the history buffer and of the datastore: one shape each
DEFAULTS = dict(
    gamma=4,
    max_match=6,
    min_match=1,
    factor=2,
    offset=0,
    min_token_prob=0,
    max_occurrences=64,
)
CONFIGS = [
    {},
    dict(min_match=2, min_token_prob=0.3, factor=1.0, offset=1.0),
    dict(gamma=7, max_match=3, factor=1.5, offset=-0.5, min_token_prob=0.1),
    dict(gamma=3, max_match=4, max_occurrences=3),
    dict(gamma=1, max_match=60, max_occurrences=1),
]


def occurrences(history, documents, n):
    """(sort key, position, continuation) of each occurrence of the last n tokens."""
    wanted = history[len(history) - n :]
    own, others = [], []
    for end in range(n, len(history)):
        if history[end - n : end] == wanted:
            follows = history[end:]
            own.append((-end, end, [follows[i % len(follows)] for i in range(9)]))
    base = 0
    for document in documents:
        for end in range(n, len(document) + 1):
            if document[end - n : end] == wanted:
                key = (document[:end][::-1], base + end)
                others.append((key, base + end, document[end:]))
        base += len(document) + 1
    return sorted(own), sorted(others)


def vote(found, n, config):
    """Majority of the continuations; returns tokens, shares, expected acceptance."""
    found = sorted(found, key=lambda f: -f[1])  # the most recent first
    limit = int(np.floor(config["factor"] * n + config["offset"]))
    tokens, shares, survival, expected = [], [], Fraction(1), Fraction(0)
    for i in range(min(config["gamma"], max(limit, 0))):
        found = [f for f in found if len(f[2]) > i]
        counts = collections.Counter(f[2][i] for f in found)  # keeps the order
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)  # the first of equal ones
        share = Fraction(counts[token], len(found))
        survival *= share
        if survival < Fraction(str(config["min_token_prob"])):
            break
        tokens.append(token)
        shares.append(share)
        expected += survival
        found = [f for f in found if f[2][i] == token]
    return tokens, shares, expected


def reference(history, documents, config):
    most, least = config["max_match"], config["min_match"]
    best = ([], [], Fraction(0), 0)
    for source in (0, 1):
        for n in range(min(most, len(history)), least - 1, -1):
            found = occurrences(history, documents, n)[source]
            if found:
                k = config["max_occurrences"]
                if len(found) > k:  # most recent, or evenly spaced in the order
                    at = [i if source == 0 else i * len(found) // k for i in range(k)]
                    found = [found[i] for i in at]
                drafted = (*vote(found, n, config), n)
                if drafted[2:] > best[2:]:
                    best = drafted
                break
    return best[0], [float(share) for share in best[1]]


@functools.cache
def _compiled(config):
    drafter = suffix(**dict(config))

    @jax.jit
    def propose(store, history, length):
        context = DraftContext(
            history=history[None],
            length=length[None],
            settings=Settings.full(1),
            features=None,
            n_new=length[None],
        )
        return drafter.propose(store, (), context)[0]

    return propose


def draft(history, documents=None, junk=0, **changes):
    """Tokens and their confidence."""
    config = DEFAULTS | changes
    buffer = np.full((SIZE,), junk, np.int32)
    buffer[: len(history)] = history
    store = None if documents is None else build_datastore(documents, size=STORE)
    run = _compiled(tuple(config.items()))
    proposal = run(store, buffer, np.int32(len(history)))
    n = int(proposal.n_valid[0])
    assert np.all(np.asarray(proposal.confidence)[0, n:] == 0)
    tokens = np.asarray(proposal.tokens)[0, :n].tolist()
    return tokens, np.asarray(proposal.confidence)[0, :n].tolist()


def check(history, documents, junk, changes):
    got = draft(history, documents, junk, **changes)
    wanted = reference(history, documents or [], DEFAULTS | changes)
    assert got[0] == wanted[0]
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-6)


@pytest.mark.parametrize("changes", CONFIGS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_history_alone_equals_the_reference(changes, data):
    letters = st.integers(0, data.draw(st.integers(0, 3)))
    history = data.draw(st.lists(letters, max_size=SIZE))
    # What lies beyond the length would continue the matches.
    check(history, None, data.draw(st.sampled_from([0, 1, -1])), changes)


@pytest.mark.parametrize("changes", CONFIGS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_with_a_datastore_it_equals_the_reference(changes, data):
    letters = st.integers(0, data.draw(st.integers(0, 3)))
    history = data.draw(st.lists(letters, max_size=12))
    document = st.lists(letters, max_size=30)
    documents = data.draw(st.lists(document, max_size=3))
    check(history, documents, data.draw(st.sampled_from([0, 1, -1])), changes)


def test_the_most_frequent_continuation_wins_over_the_most_recent():
    history = [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]
    tokens, confidence = draft(history, min_match=2)
    assert tokens[0] == 7
    assert confidence[0] == pytest.approx(2 / 3)
    # Those that went on with 7 vote further: 7 1 2, then 7 and 8 once each.
    assert tokens == [7, 1, 2, 8] and confidence[3] == pytest.approx(1 / 2)


def test_of_equally_frequent_ones_the_most_recent_wins():
    assert draft([5, 1, 5, 2, 5])[0] == [2, 5]
    assert draft([5], [[5, 1], [5, 2], [5, 3]])[0] == [3]


def test_the_longest_match_decides():
    history = [1, 2, 3, 4, 9, 3, 4, 8, 3, 4, 8, 2, 3, 4]
    assert draft(history)[0][0] == 9  # after 2 3 4, not after 3 4
    assert draft([*history[:-3], 7, 3, 4])[0][0] == 8


def test_the_draft_grows_with_the_match():
    document = [*range(10, 30)]
    for n in range(1, 6):
        tokens, _ = draft([3, *range(10, 10 + n)], [document], factor=1.0)
        assert tokens == [*range(10 + n, 10 + n + min(n, 4))]


def test_it_ends_where_the_survival_falls_below_the_least():
    documents = [[1, 2, 3], [1, 2, 4], [1, 5]]  # 2: 2/3, then 4: 1/3
    assert draft([1], documents, min_token_prob=0.3)[0] == [2, 4]
    assert draft([1], documents, min_token_prob=0.4)[0] == [2]
    assert draft([1], [*documents, [1, 6]], min_token_prob=0.4)[0] == [2]
    assert draft([1], [*documents, [1, 6], [1, 7]], min_token_prob=0.4)[0] == [2]
    assert draft([1], [[1, 6], [1, 7], [1, 8]], min_token_prob=0.4)[0] == []


def test_the_source_of_more_expected_tokens_wins():
    own = [1, 2, 7, 1, 2, 8, 1, 2]  # 8 or 7: 1/2 each, at most 4 halves
    sure = [[1, 2, 5, 6, 5, 6]]  # surely 4
    assert draft(own, sure, min_match=2)[0] == [5, 6, 5, 6]
    # As sure, and longer matched: not the row's own.
    own, long = [9, 7, 4, 4, 4, 4, 3, 9], [[3, 9, 8, 8, 8, 8]]
    assert draft(own, long)[0] == [8, 8, 8, 8]
    # Equal in both: the row's own.
    assert draft([9, 7, 3, 9], [[9, 8, 8]])[0] == [7, 3]


def test_separators_are_never_crossed():
    documents = [[1, 2], [3, 4, 5], [6]]
    assert draft([1, 2], documents)[0] == []  # nothing follows in its document
    assert draft([2, 3], documents)[0] == [4, 5]  # a match of 3, not of 2 3
    assert draft([2, 3], documents, min_match=2)[0] == []
    assert draft([6], documents)[0] == []  # nor into the room at the end
    assert draft([1], [])[0] == draft([], documents)[0] == []


def test_a_repetition_goes_on_periodically():
    assert draft([1, 2, 3, 1, 2, 3, 1, 2])[0] == [3, 1, 2, 3]
    assert draft([4, 4, 4])[0] == [4, 4, 4, 4]


def test_matches_longer_than_the_longest_count_as_the_longest():
    text = [*range(1, 16)]
    documents = [[0, *text, 20], [*text[5:], 21], [*text, 22]]
    tokens, confidence = draft([0, *text], documents)  # 6 tokens of 16
    assert tokens == [22] and confidence == [pytest.approx(1 / 3)]
    assert draft([0, *text[:5]], documents)[0] == text[5:9]


def test_another_content_compiles_nothing():
    drafter, traces = suffix(4), []

    @jax.jit
    def propose(store, history):
        traces.append(1)
        length = jnp.full((2,), 9, jnp.int32)
        context = DraftContext(history, length, Settings.full(2), None, length)
        return drafter.propose(store, (), context)[0].n_valid

    rng = np.random.default_rng(0)
    store, n_valid = build_datastore([], size=STORE), []
    for n in range(1, 9):
        history = jnp.asarray(rng.integers(0, 3, (2, SIZE)), jnp.int32)
        n_valid.append(propose(store, history).tolist())
        store = drafters.extend_datastore(store, [rng.integers(0, 3, n).tolist()])
        assert store.size == STORE
    assert len(traces) == 1 and len({str(n) for n in n_valid}) > 1


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (dict(gamma=0), "gamma=0 must be a whole number >= 1"),
        (dict(gamma=True), "gamma=True must be a whole number >= 1"),
        (dict(min_match=0), "1 <= min_match <= max_match; got min_match=0"),
        (dict(min_match=5, max_match=4), "got min_match=5, max_match=4"),
        (dict(factor=-1.0), "finite factor >= 0 .* factor=-1.0"),
        (dict(offset=float("nan")), "finite offset; .* offset=nan"),
        (dict(factor=0), "allow no draft token even after max_match=16"),
        (dict(min_token_prob=1.5), r"min_token_prob=1.5 must be in \[0, 1\]"),
        (dict(max_occurrences=0), "max_occurrences=0 must be at least 1"),
    ],
)
def test_settings_are_checked(given_, message):
    with pytest.raises(ValueError, match=message):
        suffix(**{"gamma": 1, **given_})


def test_equal_calls_give_the_identical_drafter():
    assert suffix(5) is suffix(5, factor=4, max_match=16) is suffix(gamma=5, factor=4.0)
    assert suffix(5) is drafters.by_name("suffix", 5)
    assert suffix(5) is not suffix(5, min_match=3)
