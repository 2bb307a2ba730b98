"""What lookahead guesses, keeps and proposes."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, verify
from specjax.decode import Engine, Request
from specjax.drafters import BoundDrafter, DraftContext, Scored
from specjax.sampling import Settings
from specjax.testing import tiny_model
from specjax.testing.table_target import table_model

VOCAB, GAMMA, WINDOW, GUESSES = 7, 2, 3, 2
N_WINDOW = GAMMA * WINDOW
#: Of the window alone: a chain of three links with a branch at each.
PARENTS = [-1, 0, 1, 0, 1, 2]


def make(**options):
    return drafters.lookahead(GAMMA, WINDOW, GUESSES, **options)


def context(texts, scored=None, budget=None):
    history = np.full((len(texts), 24), 6, np.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
    return DraftContext(
        history=jnp.asarray(history),
        length=jnp.asarray([len(t) for t in texts], jnp.int32),
        settings=Settings.full(len(texts)),
        features=None,
        n_new=jnp.ones((len(texts),), jnp.int32),
        scored=scored,
        budget=budget,
    )


def answered(proposal, answer, n_rows=None):
    """A pass over a proposal in which the target answers each token by a function."""
    pending = jnp.zeros_like(proposal.tokens[:, :1])
    tokens = jnp.concatenate([pending, proposal.tokens], axis=1)
    rows = 1 + proposal.n_valid if n_rows is None else jnp.asarray(n_rows)
    return Scored(tokens, rows, answer(tokens)[..., None])


def row_of(proposal, row=0):
    n = int(proposal.n_valid[row])
    both = proposal.tokens[row, :n], proposal.parents[row, :n]
    return tuple(np.asarray(x).tolist() for x in both)


def test_a_new_row_guesses_from_its_text_and_has_no_drafts_yet():
    drafter = make()
    text = [0, 1, 2, 3, 4, 5]
    proposal, state = drafter.propose(None, drafter.init(2, 24), context([text, [3]]))
    tokens, parents = row_of(proposal)
    # The three links are tokens 1, 3 and 5; below them stands what followed these.
    assert (tokens, parents) == ([1, 3, 5, 2, 4, 0], PARENTS)
    assert row_of(proposal, 1)[0] == [3] * N_WINDOW
    assert state.start.tolist() == [0, 0]
    empty, _ = drafter.propose(None, drafter.init(1, 24), context([[]]))
    assert empty.n_valid.tolist() == [0]


def test_answers_to_the_window_become_n_grams_and_the_window_moves_on():
    drafter, text = make(), [0, 1, 2, 3, 4, 5]
    proposal, state = drafter.propose(None, drafter.init(1, 24), context([text]))
    scored = answered(proposal, lambda t: (t + 3) % VOCAB)
    state = drafter.commit(None, state, context([text], scored))
    grams = [[1, 2, 5], [3, 4, 0], [5, 0, 3]]
    assert state.pool[0, :3].tolist() == grams and int(state.head[0]) == 3
    assert state.window[0].tolist() == [[2, 4, 0], [5, 0, 3]]
    for pending, _, *rest in [(g[0], *g) for g in grams]:
        proposal, _ = drafter.propose(None, state, context([[*text, pending]]))
        tokens, parents = row_of(proposal)
        # The n-gram is a branch of its own, before the window.
        assert (tokens[:GAMMA], parents[:GAMMA]) == (rest, [-1, 0])
        assert tokens[GAMMA:] == [2, 4, 0, 5, 0, 3]
        assert parents[GAMMA:] == [p + GAMMA if p >= 0 else -1 for p in PARENTS]


def test_n_grams_that_begin_alike_share_nodes_and_the_latest_are_taken():
    drafter = make()
    pool = np.full((1, 256, 3), -1, np.int32)
    pool[0, :4] = [[2, 5, 5], [2, 1, 3], [2, 1, 4], [4, 0, 0]]
    state = drafter.init(1, 24)._replace(
        pool=jnp.asarray(pool), head=jnp.asarray([4], jnp.int32)
    )
    proposal, _ = drafter.propose(None, state, context([[0, 2]]))
    tokens, parents = row_of(proposal)
    assert (tokens[:3], parents[:3]) == ([1, 4, 3], [-1, 0, 0])
    # A ring: what was written before the head's turn is older than what is behind it.
    turned = state._replace(head=jnp.asarray([1], jnp.int32))
    proposal, _ = drafter.propose(None, turned, context([[0, 2]]))
    assert row_of(proposal)[0][:2] == [5, 1]


def test_what_is_found_again_is_the_latest_and_stands_once():
    drafter, text = make(n_pool=4), [0, 1, 2, 3, 4, 5]
    first, begun = drafter.propose(None, drafter.init(1, 24), context([text]))
    scored = answered(first, lambda t: (t + 3) % VOCAB)
    state = begun
    for _ in range(2):
        state = drafter.commit(
            None, state._replace(window=begun.window), context([text], scored)
        )
    kept = [g for g in state.pool[0].tolist() if g[0] >= 0]
    assert sorted(kept) == [[1, 2, 5], [3, 4, 0], [5, 0, 3]]
    assert int(state.head[0]) == 6 % 4


def test_passes_without_their_whole_window_teach_nothing():
    drafter, text = make(), [0, 1, 2, 3, 4, 5]
    budget = jnp.asarray([N_WINDOW, N_WINDOW - 1, 0], jnp.int32)
    at = context([text] * 3, budget=budget)
    proposal, state = drafter.propose(None, drafter.init(3, 24), at)
    assert proposal.n_valid.tolist() == budget.tolist()
    scored = answered(proposal, lambda t: (t + 3) % VOCAB)
    after = drafter.commit(None, state, at._replace(scored=scored))
    assert after.head.tolist() == [3, 0, 0]
    np.testing.assert_array_equal(after.window[1:], state.window[1:])
    idle = answered(proposal, lambda t: t, n_rows=[0, 0, 0])
    again = drafter.commit(None, state, at._replace(scored=idle))
    np.testing.assert_array_equal(again.pool, state.pool)
    wiped = drafter.reset_row(after, jnp.int32(0))
    np.testing.assert_array_equal(wiped.pool, drafter.init(3, 24).pool)


def complete(model, draft, n_new=40, temperature=0.0, rule="coupled", prompt=(1, 2, 3)):
    engine = Engine(
        model, drafter=draft, rule=verify.by_name(rule), batch_size=2, capacity=112
    )
    asked = [
        Request(
            prompt_ids=(*prompt[:-1], prompt[-1] + i),
            id=i,
            max_new_tokens=n_new,
            temperature=temperature,
            seed=i,
        )
        for i in range(3)
    ]
    done = {e.id: e.completion for e in engine.run(asked) if e.completion}
    return [done[i] for i in range(3)]


def test_in_the_loop_a_first_order_target_is_guessed_ahead():
    """Its next token depends on the last one alone, and no answer comes twice.

    The window goes on from all tokens of the prompt, the text from the last one; by the
    time it comes to the others the window has been there.
    """
    size = 61
    table = np.full((size, size, size), -9.0)
    table[:, np.arange(size), (np.arange(size) + 1) % size] = 9.0
    model = table_model(table)
    asked = {"n_new": 60, "prompt": (1, 20, 40)}
    plain = complete(model, drafters.plain(), **asked)
    done = complete(model, BoundDrafter(drafters.lookahead(3, 6, 4), None), **asked)
    assert [c.ids for c in done] == [c.ids for c in plain]
    # Nothing in the text repeats: retrieval finds nothing, lookahead does.
    lookup = complete(model, drafters.prompt_lookup(3), **asked)
    assert all(c.stats.accepted == 0 for c in lookup)
    assert all(c.stats.passes < 0.7 * c.stats.committed for c in done)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_on_a_decoder_the_text_is_that_of_plain_decoding(temperature):
    model = tiny_model(3, vocab_size=13)
    plain = complete(model, drafters.plain(), temperature=temperature)
    draft = BoundDrafter(drafters.lookahead(3, 4, 3), None)
    done = complete(model, draft, temperature=temperature)
    assert [c.ids for c in done] == [c.ids for c in plain]
    assert sum(c.stats.accepted for c in done) > 10


def test_wrong_arguments_say_what_would_be_right():
    with pytest.raises(ValueError, match="gamma=0"):
        drafters.lookahead(0)
    with pytest.raises(ValueError, match="window=0"):
        drafters.lookahead(3, 0)
    with pytest.raises(ValueError, match="guesses=True"):
        drafters.lookahead(3, 2, True)
    with pytest.raises(ValueError, match="n_pool=3 n-grams must hold"):
        drafters.lookahead(3, 4, 2, n_pool=3)
    with pytest.raises(ValueError, match="'block' .*chain"):
        complete(tiny_model(), make(), rule="block")
    assert drafters.lookahead(3) is drafters.by_name("lookahead", 3)
