"""A model as the drafter: what it drafts, how it keeps up, and what it refuses."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, trees, verify
from specjax.decode import Engine, Request, programs
from specjax.drafters import BoundDrafter, DraftContext, match_noise
from specjax.ops.platform import row_invariant
from specjax.sampling import Settings, warp
from specjax.testing import tiny_model
from specjax.testing.loop_checks import check_law, make_model
from specjax.testing.table_target import table_model

GAMMA, VOCAB, CAPACITY = 3, 13, 112
DRAFT = tiny_model(5, vocab_size=VOCAB, width=16)
TARGET = tiny_model(6, vocab_size=VOCAB)
TEXT = np.random.default_rng(3).integers(0, VOCAB, 100)


def bound(draws="sample", **options):
    return BoundDrafter(
        drafters.model(DRAFT.target, GAMMA, draws=draws, **options), DRAFT.params
    )


def context(length, *, temperature=0.0, budget=None, seed=0):
    """One row whose text is the first ``length`` tokens of TEXT."""
    return DraftContext(
        history=jnp.asarray(TEXT[None], jnp.int32),
        length=jnp.asarray([length], jnp.int32),
        settings=Settings.full(1, temperature=temperature, seed=seed),
        features=None,
        n_new=jnp.asarray([1], jnp.int32),
        budget=None if budget is None else jnp.asarray([budget], jnp.int32),
    )


class Driven:
    """A drafter's functions, compiled, in arithmetic that no width changes."""

    def __init__(self, draft):
        self.draft = draft

        def propose(params, state, context):
            with row_invariant():
                return draft.drafter.propose(params, state, context)

        self._propose = jax.jit(propose)
        self._commit = jax.jit(draft.drafter.commit)
        self.state = draft.drafter.init(1, CAPACITY)

    def propose(self, at):
        proposal, self.state = self._propose(self.draft.params, self.state, at)
        return proposal

    def commit(self, at):
        self.state = self._commit(self.draft.params, self.state, at)


def own_text(prompt, n, **settings):
    """What the draft model itself writes after a prompt."""
    done = specjax.generate(
        DRAFT, [prompt], drafter=None, max_new_tokens=n, ignore_eos=True, **settings
    )
    return list(done.completions[0].ids)


@pytest.mark.parametrize("draws", ["sample", "argmax"])
def test_at_temperature_0_it_drafts_what_the_model_would_write(draws):
    driven = Driven(bound(draws))
    for length in (1, 2, 4, 40, 100):
        # From any distance: what it has not read yet is read first, in chunks.
        got = driven.propose(context(length)).tokens[0].tolist()
        assert got == own_text(TEXT[:length].tolist(), GAMMA)


def test_coupled_drafts_are_the_models_own_coupled_text():
    """One seed, one noise: the draft of a copy of the target is what it will say."""
    coupled = match_noise(bound().drafter, "gumbel")
    assert coupled.spec.draws == "coupled"
    driven = Driven(BoundDrafter(coupled, DRAFT.params))
    for seed in range(3):
        at = context(50, temperature=0.9, seed=seed)
        want = own_text(TEXT[:50].tolist(), GAMMA, temperature=0.9, seed=seed)
        assert driven.propose(at).tokens[0].tolist() == want
        driven.state = bound().drafter.init(1, CAPACITY)


def test_the_law_that_comes_with_a_draft_is_the_warped_one():
    at = context(30, temperature=0.7)
    at = at._replace(settings=at.settings._replace(top_p=jnp.asarray([0.8])))
    proposal = Driven(bound()).propose(at)
    ids = np.concatenate([TEXT[:30], proposal.tokens[0]])
    cache = DRAFT.target.init_cache(1, CAPACITY)
    logits, _, _ = DRAFT.target.forward(DRAFT.params, jnp.asarray(ids)[None], cache)
    scores = warp(logits[:, 29 : 29 + GAMMA], at.settings)
    want = np.asarray(jax.nn.log_softmax(scores)[0])
    got = np.asarray(proposal.logprobs)[0]
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    kept = np.isfinite(want)
    np.testing.assert_allclose(got[kept], want[kept], atol=1e-5)
    assert np.all(got[np.arange(GAMMA), proposal.tokens[0]] > -np.inf)


def test_passes_with_other_drafts_leave_it_behind_but_not_wrong():
    """As when another drafter was preferred, or nothing was drafted, for a while."""
    driven, length = Driven(bound()), 20
    driven.propose(context(length))
    for _ in range(9):  # further than one chunk
        length += 4
        driven.commit(context(length))
        assert driven.propose(context(length, budget=0)).n_valid[0] == 0
    assert int(driven.state.seen[0]) < length - 17
    got = driven.propose(context(length))
    fresh = Driven(bound()).propose(context(length))
    np.testing.assert_array_equal(got.tokens, fresh.tokens)


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_a_budget_shortens_the_draft_and_its_work(budget):
    driven = Driven(bound())
    whole = driven.propose(context(25))
    driven.state = bound().drafter.init(1, CAPACITY)
    some = driven.propose(context(25, budget=budget))
    assert int(some.n_valid[0]) == budget
    np.testing.assert_array_equal(some.tokens[0, :budget], whole.tokens[0, :budget])
    assert not np.any(some.tokens[0, budget:])
    assert int(driven.state.read[0]) == (24 + budget if budget else 0)


def requests(n_new=40):
    prompts = [TEXT[:5], TEXT[7:37], TEXT[3:6]]
    return [
        Request(
            prompt_ids=tuple(int(t) for t in prompt),
            id=i,
            max_new_tokens=n_new,
            temperature=(0.0, 0.8, 1.3)[i],
            seed=i,
        )
        for i, prompt in enumerate(prompts)
    ]


def complete(draft, rule="coupled", *, model=TARGET):
    engine = Engine(
        model,
        drafter=draft,
        rule=verify.by_name(rule),
        batch_size=2,
        capacity=CAPACITY,
        exact=True,
        width=GAMMA + 1,
    )
    return {
        e.id: e.completion for e in engine.run(requests()) if e.completion is not None
    }


def test_text_is_that_of_plain_decoding_and_a_copy_is_always_right():
    plain = complete(drafters.plain())
    # One program: only the parameters differ.
    for draft in (tiny_model(7, vocab_size=VOCAB), TARGET):
        draft = drafters.from_model(TARGET, draft, GAMMA)
        done = complete(draft)
        assert {i: c.ids for i, c in done.items()} == {
            i: c.ids for i, c in plain.items()
        }
    stats = [c.stats for c in done.values()]
    # 40 tokens are 10 passes of 4.
    assert [s.passes for s in stats] == [10] * 3
    assert all(s.accepted == s.verified for s in stats)


@pytest.mark.parametrize(
    "rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)]
)
def test_sequences_have_the_targets_law(rule):
    rng = np.random.default_rng(8)
    small = table_model(1.5 * rng.normal(size=(5, 5, 5)))
    draft = BoundDrafter(drafters.model(small.target, GAMMA), small.params)
    fault = check_law(make_model(), verify.by_name(rule), draft, calls=80)
    assert fault is None, fault


def test_a_row_that_outgrows_the_drafts_context_goes_on_plainly():
    short = tiny_model(6, vocab_size=VOCAB, max_context=24)
    draft = drafters.from_model(TARGET, short, GAMMA)
    assert short.target is not TARGET.target
    plain, done = complete(drafters.plain()), complete(draft)
    assert {i: c.ids for i, c in done.items()} == {i: c.ids for i, c in plain.items()}
    # 5 and 3 tokens of prompt: drafts up to 24 of text. 30: none at all.
    verified = {i: c.stats.verified for i, c in done.items()}
    assert verified[1] == 0 and verified[0] > 9 and verified[2] > 9
    assert all(c.stats.accepted == c.stats.verified for c in done.values())
    assert done[0].stats.passes > 15


@pytest.mark.parametrize(("draft_vocab", "n_ids"), [(9, None), (16, 9)])
def test_ids_that_one_side_lacks_are_never_drafted(draft_vocab, n_ids):
    small = tiny_model(5, vocab_size=draft_vocab, width=16)
    made = drafters.model(small.target, GAMMA, vocab_size=VOCAB, n_ids=n_ids)
    driven = Driven(BoundDrafter(made, small.params))
    for length in (9, 33, 80):  # their texts hold ids that the draft lacks
        proposal = driven.propose(context(length, temperature=1.5))
        assert proposal.logprobs.shape == (1, GAMMA, VOCAB)
        assert np.all(np.asarray(proposal.tokens) < 9)
        laws = np.exp(np.asarray(proposal.logprobs, np.float64))
        np.testing.assert_allclose(laws.sum(-1), 1, atol=1e-5)
        assert not np.any(laws[..., 9:])


def test_nan_logits_of_the_draft_are_seen():
    spoilt = jax.tree.map(lambda x: x * jnp.nan, DRAFT.params)
    driven = Driven(BoundDrafter(bound().drafter, spoilt))
    for temperature in (0.0, 0.8):
        proposal = driven.propose(context(20, temperature=temperature))
        assert np.all(np.isnan(np.max(proposal.logprobs, axis=-1)))


def test_vocabularies_are_compared_by_content():
    other = dataclasses.replace(
        DRAFT, tokenizer=tiny_model(vocab_size=VOCAB - 1).tokenizer, name="other"
    )
    with pytest.raises(ValueError, match="other cannot draft for tiny-6: id 12 is"):
        drafters.from_model(TARGET, other)
    with pytest.raises(ValueError, match="without a tokenizer"):
        drafters.from_model(TARGET, dataclasses.replace(DRAFT, tokenizer=None))


def test_wrong_arguments_say_what_would_be_right():
    with pytest.raises(ValueError, match="gamma=0"):
        drafters.model(DRAFT.target, 0)
    with pytest.raises(ValueError, match="'sample', 'coupled' or 'argmax'"):
        drafters.model(DRAFT.target, 2, draws="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"n_ids=14 must be in \[1, 13\]"):
        drafters.model(DRAFT.target, 2, n_ids=14)
    recurrent = DRAFT.target._replace(
        spec=dataclasses.replace(DRAFT.target.spec, cache_kind="recurrent")
    )
    with pytest.raises(ValueError, match="'recurrent'"):
        drafters.model(recurrent, 2)
    with pytest.raises(ValueError, match="target's own noise"):
        complete(bound("coupled"), "rejection")
    with pytest.raises(ValueError, match="brings its own parameters"):
        specjax.generate(TARGET, [[1]], drafter=bound(), draft_params=DRAFT.params)


def test_equal_calls_give_the_identical_drafter():
    assert bound().drafter is bound().drafter
    assert match_noise(bound().drafter, "gumbel") is bound("coupled").drafter
    assert match_noise(bound().drafter, "uniform") is bound().drafter


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *("model", "model_tree", "fallback", "early_exit", "self_draft"),
        *("suffix_tree", "recycling_tree"),
    ],
)
def test_the_loop_copies_no_cache_and_reuses_all_of_its_state(kind):
    long = tiny_model(6, vocab_size=VOCAB, max_context=2048)
    small = drafters.from_model(long, long, GAMMA)
    draft = {
        "model": small,
        "model_tree": drafters.from_model(long, long, trees.k_ary(2, 2)),
        "fallback": drafters.fallback(drafters.prompt_lookup(4), small),
        "early_exit": drafters.early_exit(long.target, 1, GAMMA),
        "self_draft": drafters.layer_skip(long, GAMMA, ff=(1,)),
        "suffix_tree": drafters.suffix(GAMMA, n_nodes=6),
        "recycling_tree": drafters.token_recycling(VOCAB, trees.k_ary(2, 2)),
    }[kind]
    engine = Engine(
        long, drafter=draft, rule=verify.rejection, batch_size=3, capacity=1000
    )
    params = draft.params if isinstance(draft, BoundDrafter) else None
    start = np.zeros((3,), np.int32)
    lowered = programs(engine.plan, 16).run.lower(
        long.params, params, engine.state, start, np.int32(8)
    )
    compiled = lowered.compile()
    assert not re.findall(r"= f32\[3,1,1024,16\]\S* copy", compiled.as_text())
    state = sum(x.nbytes for x in jax.tree.leaves(engine.state))
    memory = compiled.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= state
