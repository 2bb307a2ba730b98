"""What token recycling learns, from passes of the loop and from texts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, verify
from specjax.decode import Engine, Request
from specjax.drafters import BoundDrafter, DraftContext, Scored
from specjax.sampling import Settings
from specjax.testing import tiny_model
from specjax.testing.table_target import table_model

VOCAB, GAMMA = 6, 3


def propose(drafter, state, texts, params=None, budget=None):
    history = np.full((len(texts), 16), 5, np.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = text
    context = DraftContext(
        history=jnp.asarray(history),
        length=jnp.asarray([len(t) for t in texts], jnp.int32),
        settings=Settings.full(len(texts)),
        features=None,
        n_new=jnp.ones((len(texts),), jnp.int32),
        budget=budget,
    )
    proposal, _ = drafter.propose(params, state, context)
    rows = zip(np.asarray(proposal.tokens), proposal.n_valid, strict=True)
    return [row[:n].tolist() for row, n in rows], context


def test_the_latest_answer_to_a_token_wins_row_by_row():
    drafter = drafters.token_recycling(VOCAB, GAMMA)
    state = drafter.init(2, 16)
    _, context = propose(drafter, state, [[1], [1]])
    # Row 0 met token 1 twice in the pass; row 1 had one row that counts.
    block = jnp.asarray([[1, 2, 1], [1, 2, 1]])
    top = jnp.asarray([[[2], [3], [4]], [[0], [3], [4]]])
    scored = Scored(block, jnp.asarray([3, 1]), top)
    state = drafter.commit(None, state, context._replace(scored=scored))
    drafts, _ = propose(drafter, state, [[1], [1]])
    assert drafts == [[4], [0]]
    # What nobody has answered is looked up in the text, the latest first: 0 -> 5 -> 2.
    text = [0, 4, 0, 5, 2, 1]
    drafts, _ = propose(drafter, state, [text, text])
    assert drafts == [[4, 0, 5], [0, 5, 2]]
    again = drafter.reset_row(state, jnp.int32(0))
    assert propose(drafter, again, [[1], [1]])[0] == [[], [0]]
    assert propose(drafter, again, [[1], text], budget=jnp.asarray([3, 1]))[0][1] == [0]


def test_parameters_answer_last():
    drafter = drafters.token_recycling(VOCAB, GAMMA)
    table = drafters.successor_table([[1, 2, 3], [1, 2, 1, 4, 1, 4]], VOCAB)
    np.testing.assert_array_equal(table, [-1, 2, 1, -1, 1, -1])
    drafts, _ = propose(drafter, drafter.init(1, 16), [[0, 1]], jnp.asarray(table))
    assert drafts == [[2, 1, 2]]
    drafts, _ = propose(drafter, drafter.init(1, 16), [[1, 3, 1]], jnp.asarray(table))
    assert drafts == [[3, 1, 3]]


def test_wrong_arguments_say_what_would_be_right():
    with pytest.raises(ValueError, match="document 1 holds id 6, outside"):
        drafters.successor_table([[1, 2], [6]], VOCAB)
    with pytest.raises(ValueError, match="vocab_size=0"):
        drafters.token_recycling(0)
    assert drafters.successor_table([], 2).tolist() == [-1, -1]
    assert drafters.token_recycling(VOCAB) is drafters.token_recycling(VOCAB)


def test_in_the_loop_a_first_order_target_is_soon_known():
    """Its next token depends on the last one alone: what was seen once is right."""
    rng = np.random.default_rng(3)
    steps = rng.permutation(VOCAB)
    table = np.full((VOCAB, VOCAB, VOCAB), -9.0)
    table[:, np.arange(VOCAB), steps] = 9.0
    model = table_model(table)
    request = Request(prompt_ids=(1,), max_new_tokens=24)

    def complete(draft, rows=1):
        engine = Engine(
            model, drafter=draft, rule=verify.greedy, batch_size=2, capacity=64
        )
        asked = [dataclasses.replace(request, id=i) for i in range(rows)]
        return [e.completion for e in engine.run(asked) if e.completion]

    plain = complete(drafters.plain())[0]
    done = complete(BoundDrafter(drafters.token_recycling(VOCAB, GAMMA), None), 3)
    for each in done:
        assert each.ids == plain.ids and each.stats == done[0].stats
    # At most one pass a token that is new, then whole drafts.
    assert done[0].stats.passes <= VOCAB + 24 // (GAMMA + 1)
    assert done[0].stats.accepted == done[0].stats.verified > 12


def test_real_passes_carry_what_was_scored():
    model = tiny_model(3, vocab_size=VOCAB)
    done = {}
    for name, draft in {
        "plain": BoundDrafter(drafters.plain(), None),
        "recycling": BoundDrafter(drafters.token_recycling(VOCAB, GAMMA), None),
    }.items():
        engine = Engine(
            model,
            drafter=draft,
            rule=verify.coupled,
            batch_size=1,
            capacity=64,
            exact=True,
            width=GAMMA + 1,
        )
        request = Request(prompt_ids=(1, 2), max_new_tokens=30, temperature=0.9)
        done[name] = next(e.completion for e in engine.run([request]) if e.completion)
    assert done["plain"].ids == done["recycling"].ids
    assert done["recycling"].stats.accepted > 3
