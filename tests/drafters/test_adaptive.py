"""Draft lengths by acceptance and cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, theory, verify
from specjax.decode import Engine, Request
from specjax.drafters import DraftContext, PassCosts
from specjax.drafters._adaptive import best_lengths
from specjax.sampling import Settings
from specjax.testing import planted, tiny_model
from specjax.testing.loop_checks import check_law, make_model, sampled_draft

GAMMA, VOCAB = 4, 13
COSTS = PassCosts(draft=0.05, verify=(1.0, 1.3, 1.4, 1.5, 1.6))
TARGET = tiny_model(6, vocab_size=VOCAB)


@pytest.mark.parametrize("acceptance", [0.0, 0.05, 0.3, 0.55, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("draft", [0.0, 0.1, 0.5])
def test_lengths_are_the_best_of_the_bank(acceptance, draft):
    lengths, gamma = (0, 1, 2, 4, 8), 8
    verify_cost = 1 + 0.08 * np.arange(gamma + 1) + 0.2 * (np.arange(gamma + 1) > 0)
    cost = draft * np.arange(gamma + 1) + verify_cost
    got = best_lengths(
        jnp.asarray([acceptance]), jnp.asarray(cost[list(lengths)]), lengths
    )
    curve = [theory.expected_tokens_per_pass(acceptance, n) / cost[n] for n in lengths]
    assert int(got[0]) == lengths[int(np.argmax(curve))]


def test_nothing_pays_where_nothing_passes_and_all_does_where_all_passes():
    cost = jnp.asarray([1.0, 1.3, 1.6])
    got = best_lengths(jnp.asarray([0.0, 1.0]), cost, (0, 2, 4))
    assert got.tolist() == [0, 4]


def context(text, length):
    history = np.zeros((1, 64), np.int32)
    history[0, : len(text)] = text
    return DraftContext(
        history=jnp.asarray(history),
        length=jnp.asarray([length], jnp.int32),
        settings=Settings.full(1),
        features=None,
        n_new=jnp.ones((1,), jnp.int32),
    )


@functools.cache
def compiled(drafter):
    return jax.jit(drafter.propose), jax.jit(drafter.commit)


def walk(draft, text, start, rights):
    """Lengths drafted over passes in which so many drafts are right."""
    propose, commit = compiled(draft.drafter)
    state, length, drafted = draft.drafter.init(1, 64), start, []
    for right in rights:
        proposal, state = propose(draft.params, state, context(text, length))
        n = int(proposal.n_valid[0])
        drafted.append(n)
        kept = min(right, n)
        text = [*text[:length], *proposal.tokens[0, :kept].tolist(), 12]
        length += kept + 1
        state = commit(draft.params, state, context(text, length))
    return drafted


def test_it_shortens_where_drafts_fail_gives_up_and_tries_again():
    inner = planted.constant(GAMMA, VOCAB, [1, 2, 3, 4])
    draft = drafters.adaptive(inner, COSTS)
    assert draft.drafter.spec.bank == (0, 2, 4)
    failing = walk(draft, [5], 1, [0] * 40)
    assert failing[0] == 4 and 0 in failing
    first = failing.index(0)
    assert sorted(failing[:first], reverse=True) == failing[:first]
    again = failing[first:]
    assert max(again) > 0 and np.mean(np.asarray(again) == 0) > 0.5
    passing = walk(draft, [5], 1, [4] * 10)
    assert passing == [4] * 10


def test_costs_are_traced_and_decide():
    inner = planted.constant(GAMMA, VOCAB, [1, 2, 3, 4])
    dear = PassCosts(0.9, COSTS.verify)
    one, two = drafters.adaptive(inner, COSTS), drafters.adaptive(inner, dear)
    assert one.drafter is two.drafter
    assert walk(two, [5], 1, [1] * 3) == [0] * 3
    assert walk(one, [5], 1, [1] * 3)[0] == 4


def complete(draft, *, exact):
    engine = Engine(
        TARGET,
        drafter=draft,
        rule=verify.coupled,
        batch_size=2,
        capacity=112,
        exact=exact,
        width=GAMMA + 1 if exact else None,
    )
    requests = [
        Request(
            prompt_ids=(i + 1, 2, 3, 1, 2, 3, 1),
            id=i,
            max_new_tokens=30,
            temperature=(0.0, 0.9, 0.5)[i],
            seed=i,
        )
        for i in range(3)
    ]
    done = {e.id: e.completion for e in engine.run(requests) if e.completion}
    return engine.plan, [done[i] for i in range(3)]


def test_text_is_the_same_whatever_it_does():
    lookup = drafters.prompt_lookup(GAMMA, min_ngram=1)
    _, plain = complete(drafters.plain(), exact=True)
    draft = drafters.adaptive(lookup, COSTS)
    plan, done = complete(draft, exact=True)
    assert plan.widths == (GAMMA + 1,)
    assert [c.ids for c in done] == [c.ids for c in plain]
    fixed = complete(lookup, exact=True)[1]
    assert sum(c.stats.verified for c in done) < sum(c.stats.verified for c in fixed)


@pytest.mark.slow
def test_each_length_has_a_pass_of_its_width():
    draft = drafters.adaptive(drafters.prompt_lookup(GAMMA, min_ngram=1), COSTS)
    plan, done = complete(draft, exact=False)
    assert plan.widths == (1, 3, 5)
    assert all(len(c.ids) == 30 for c in done)


@pytest.mark.slow
def test_sequences_have_the_targets_law_under_drawn_drafts():
    """What is cut must not depend on the drafts that are cut."""
    costs = PassCosts(0.1, (1.0, 1.2, 1.4, 1.6))
    draft = drafters.adaptive(sampled_draft(), costs)
    fault = check_law(make_model(), verify.rejection, draft, calls=80)
    assert fault is None, fault


def test_wrong_arguments_say_what_would_be_right():
    inner = drafters.prompt_lookup(GAMMA)
    with pytest.raises(ValueError, match="needs one for each of 0 to 4 drafts"):
        drafters.adaptive(inner, PassCosts(0.0, (1.0, 1.2)))
    with pytest.raises(ValueError, match=r"lengths in \[0, 4\]"):
        drafters.adaptive(inner, COSTS, bank=(0, 5))
    with pytest.raises(ValueError, match="finite and above 0"):
        drafters.adaptive(inner, PassCosts(0.0, (1.0, 1.2, 0.0, 1.3, 1.4)))
    with pytest.raises(ValueError, match="costs.draft=-1.0"):
        drafters.adaptive(inner, PassCosts(-1.0, COSTS.verify))
    with pytest.raises(ValueError, match="gamma=0"):
        drafters.adaptive(drafters.plain(), PassCosts(0.0, (1.0,)))
