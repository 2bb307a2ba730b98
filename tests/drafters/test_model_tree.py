"""A model as a drafter of trees: what it drafts, how it keeps up, what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import drafters, trees, verify
from specjax.decode import Engine, Request
from specjax.drafters import BoundDrafter, DraftContext, match_noise
from specjax.sampling import Settings, warp
from specjax.testing import tiny_model
from specjax.testing.loop_checks import check_law, make_model
from specjax.testing.table_target import table_model

VOCAB, CAPACITY = 13, 112
DRAFT = tiny_model(5, vocab_size=VOCAB, width=16)
TARGET = tiny_model(6, vocab_size=VOCAB)
TEXT = np.random.default_rng(3).integers(0, VOCAB, 100)
#: Two children, of which the second too has children: paths that are no leading rows.
TREE = trees.Topology((-1, -1, 0, 1, 1, 3, 4))


def bound(draws="sample", tree=TREE):
    return BoundDrafter(drafters.model(DRAFT.target, tree, draws=draws), DRAFT.params)


def context(length, *, temperature=0.0, budget=None, seed=0, text=TEXT):
    """One row whose text is the first ``length`` tokens."""
    return DraftContext(
        history=jnp.asarray(text[None], jnp.int32),
        length=jnp.asarray([length], jnp.int32),
        settings=Settings.full(1, temperature=temperature, seed=seed, top_p=0.9),
        features=None,
        n_new=jnp.asarray([1], jnp.int32),
        budget=None if budget is None else jnp.asarray([budget], jnp.int32),
    )


class Driven:
    """A drafter's functions, compiled."""

    def __init__(self, draft):
        self.draft = draft
        self._propose = jax.jit(draft.drafter.propose)
        self._commit = jax.jit(draft.drafter.commit)
        self.state = draft.drafter.init(1, CAPACITY)

    def propose(self, at):
        proposal, self.state = self._propose(self.draft.params, self.state, at)
        return proposal

    def commit(self, at):
        self.state = self._commit(self.draft.params, self.state, at)


def logits_after(ids):
    """What the draft model says after a text, read whole."""
    cache = DRAFT.target.init_cache(1, CAPACITY)
    ids = jnp.asarray(ids, jnp.int32)[None]
    logits, _, _ = DRAFT.target.forward(DRAFT.params, ids, cache)
    return logits[:, -1:]


def above(tokens, length):
    """Yields each node's children and the text that ends in the node."""
    for row, children in enumerate(TREE.children):
        path = np.flatnonzero(TREE.ancestors[row - 1]) if row else []
        if children:
            yield row, list(children), [*TEXT[:length], *tokens[list(path)]]


@pytest.mark.parametrize("draws", ["sample", "without_replacement", "argmax"])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_at_temperature_0_children_are_the_most_probable_tokens(draws, length):
    tokens = np.asarray(Driven(bound(draws)).propose(context(length)).tokens)[0]
    for _, children, text in above(tokens, length):
        best = np.argsort(-np.asarray(logits_after(text))[0, 0], kind="stable")
        assert tokens[children].tolist() == best[: len(children)].tolist()


@pytest.mark.parametrize("draws", ["sample", "without_replacement"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_law_of_a_nodes_children_is_the_warped_one(draws, temperature):
    at = context(30, temperature=temperature)
    proposal = Driven(bound(draws)).propose(at)
    tokens, laws = np.asarray(proposal.tokens)[0], np.asarray(proposal.logprobs)[0]
    for row, children, text in above(tokens, 30):
        scores = warp(logits_after(text), at.settings)
        want = np.asarray(jax.nn.log_softmax(scores)[0, 0])
        if draws == "without_replacement" and temperature:
            # A thousandth is unfiltered, so that siblings never run out of tokens.
            whole = jax.nn.softmax(logits_after(text)[0, 0] / temperature)
            want = np.log(np.exp(want) * 1023 / 1024 + np.asarray(whole) / 1024)
        np.testing.assert_array_equal(np.isfinite(laws[row]), np.isfinite(want))
        kept = np.isfinite(want)
        np.testing.assert_allclose(laws[row][kept], want[kept], atol=1e-5)
        assert laws[row][tokens[children[0]]] > -np.inf
        if draws == "without_replacement":
            assert len(set(tokens[children])) == len(children)


def test_children_are_drawn_from_their_law_and_siblings_apart():
    """Frequencies of the first child, and of the second given the first, over seeds."""
    n, star, at = 4000, trees.Topology((-1, -1)), context(30, temperature=0.9)
    for draws in ("sample", "without_replacement"):
        made, params = bound(draws, star)

        def propose(seed, made=made, params=params):
            settings = Settings.full(1, temperature=0.9)._replace(seed=seed[None])
            drawn = at._replace(settings=settings)
            return made.propose(params, made.init(1, 40), drawn)[0]

        seeds = jnp.arange(n, dtype=jnp.uint32)
        proposal = jax.jit(lambda seeds, one=propose: jax.lax.map(one, seeds))(seeds)
        first, second = np.asarray(proposal.tokens)[:, 0].T
        law = np.exp(np.asarray(proposal.logprobs, np.float64)[0, 0, 0])
        pairs = np.outer(law, law)
        if draws == "without_replacement":
            pairs = law[:, None] * law[None, :] / (1 - law[:, None])
            np.fill_diagonal(pairs, 0)
        counts = np.zeros((VOCAB, VOCAB))
        np.add.at(counts, (first, second), 1)
        sigma = np.sqrt(n * pairs * (1 - pairs)) + 1e-9
        assert np.all(np.abs(counts - n * pairs) < 5 * sigma + 1), draws


def test_coupled_children_begin_with_the_models_own_text():
    coupled = match_noise(bound().drafter, "gumbel")
    assert coupled is match_noise(bound("without_replacement").drafter, "gumbel")
    assert coupled.spec.draws == "coupled"
    leftmost = [0, 2]
    for seed in range(3):
        at = context(50, temperature=0.9, seed=seed)
        proposal = Driven(BoundDrafter(coupled, DRAFT.params)).propose(at)
        assert proposal.logprobs is None
        own = specjax.generate(
            DRAFT,
            [TEXT[:50].tolist()],
            drafter=None,
            max_new_tokens=2,
            ignore_eos=True,
            temperature=0.9,
            top_p=0.9,
            seed=seed,
        )
        assert proposal.tokens[0, leftmost].tolist() == list(own.completions[0].ids)


@pytest.mark.parametrize("path", [(), (0,), (1,), (0, 2), (1, 4), (1, 4, 6), (1, 3, 5)])
def test_what_was_read_of_a_committed_path_is_kept_and_nothing_else(path):
    """After any path, with a bonus token, the next draft is that of a fresh start."""
    driven, length = Driven(bound()), 20
    drafted = np.asarray(driven.propose(context(length)).tokens)[0]
    bonus = next(t for t in range(VOCAB) if t not in drafted)
    text = np.concatenate([TEXT[:length], drafted[list(path)], [bonus], TEXT[30:]])
    end = length + len(path) + 1
    driven.commit(context(end, text=text))
    # All but the last level was read: at most that level and the bonus are missing.
    assert int(driven.state.seen[0]) == length + min(len(path), TREE.max_depth - 1)
    assert int(driven.state.cache.length[0]) == int(driven.state.seen[0])
    for temperature in (0.0, 0.8):
        at = context(end, text=text, temperature=temperature)
        fresh = Driven(bound())
        got, want = driven.propose(at), fresh.propose(at)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_allclose(
            np.exp(got.logprobs), np.exp(want.logprobs), atol=1e-5
        )
        driven.commit(at)


def test_passes_with_other_drafts_leave_it_behind_but_not_wrong():
    driven, length = Driven(bound()), 20
    driven.propose(context(length))
    for _ in range(9):
        length += 4
        driven.commit(context(length))
        assert driven.propose(context(length, budget=0)).n_valid[0] == 0
    assert int(driven.state.seen[0]) < length - 17
    got = driven.propose(context(length))
    np.testing.assert_array_equal(
        got.tokens, Driven(bound()).propose(context(length)).tokens
    )


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


def complete(draft, rule="coupled"):
    engine = Engine(
        TARGET,
        drafter=draft,
        rule=verify.by_name(rule),
        batch_size=2,
        capacity=CAPACITY,
    )
    return {e.id: e.completion for e in engine.run(requests()) if e.completion}


def test_text_is_that_of_plain_decoding_and_a_copy_is_always_right():
    plain = complete(drafters.plain())
    for small in (tiny_model(7, vocab_size=VOCAB), TARGET):
        done = complete(drafters.from_model(TARGET, small, TREE))
        assert {i: c.ids for i, c in done.items()} == {
            i: c.ids for i, c in plain.items()
        }
    # The leftmost path is two tokens long, and a bonus follows.
    assert all(c.stats.passes <= 14 for c in done.values())


@pytest.mark.parametrize(
    ("draws", "rule"), [("sample", "rejection"), ("without_replacement", "traversal")]
)
def test_sequences_have_the_targets_law(draws, rule):
    rng = np.random.default_rng(8)
    small = table_model(1.5 * rng.normal(size=(5, 5, 5)))
    tree = trees.Topology((-1, -1, 0, 0, 1))
    draft = BoundDrafter(drafters.model(small.target, tree, draws=draws), small.params)
    fault = check_law(make_model(), verify.by_name(rule), draft, calls=60)
    assert fault is None, fault


def test_a_tree_that_is_a_chain_is_the_chain():
    chain = trees.chain(3)
    assert bound(tree=chain).drafter is drafters.model(DRAFT.target, 3)


def test_a_row_that_outgrows_the_drafts_context_goes_on_plainly():
    short = tiny_model(6, vocab_size=VOCAB, max_context=24)
    done = complete(drafters.from_model(TARGET, short, TREE))
    plain = complete(drafters.plain())
    assert {i: c.ids for i, c in done.items()} == {i: c.ids for i, c in plain.items()}
    assert done[1].stats.verified == 0 and done[0].stats.verified > 9


def test_nan_logits_of_the_draft_are_seen():
    spoilt = jax.tree.map(lambda x: x * jnp.nan, DRAFT.params)
    driven = Driven(BoundDrafter(bound().drafter, spoilt))
    rows = [row for row, children in enumerate(TREE.children) if children]
    for temperature in (0.0, 0.8):
        proposal = driven.propose(context(20, temperature=temperature))
        assert np.all(np.isnan(np.max(proposal.logprobs[:, rows], axis=-1)))


def test_wrong_arguments_say_what_would_be_right():
    flat = DRAFT.target._replace(gather_path=None)
    with pytest.raises(ValueError, match="give gamma as a number"):
        drafters.model(flat, TREE)
    wide = trees.Topology((-1,) * 14)
    with pytest.raises(ValueError, match="14 children and only n_ids=13"):
        drafters.model(DRAFT.target, wide)
    gaps = trees.Topology((-1, -1), ranks=(0, 2))
    with pytest.raises(ValueError, match="leaves ranks out"):
        drafters.model(DRAFT.target, gaps)
    assert drafters.model(DRAFT.target, gaps, draws="argmax").spec.gamma == 2
    with pytest.raises(ValueError, match="'without_replacement' is not known"):
        drafters.model(DRAFT.target, 3, draws="without_replacement")
    for draws, rule in [
        ("without_replacement", "rejection"),
        ("sample", "traversal"),
        ("sample", "block"),
    ]:
        with pytest.raises(ValueError, match=rule):
            complete(bound(draws), rule)
