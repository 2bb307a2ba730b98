"""Trees through the whole loop: the same text, the same numbers, fewer passes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, trees, verify
from specjax.decode import Controls, Engine, Origin, Request
from specjax.drafters import BoundDrafter
from specjax.sampling import ControlSpec
from specjax.testing import planted, planted_trees, tiny_model
from specjax.testing.loop_checks import make_model
from specjax.testing.table_target import table_model

pytestmark = pytest.mark.xdist_group("decode_trees")

# A table's logits are the same numbers in any pass: ids can be compared exactly.
MODEL = make_model()
VOCAB, STOP = 5, 4
UNEVEN = trees.Topology((-1, -1, 0, 0, 1, 2, 5, -1))
PLAIN = BoundDrafter(drafters.plain(), None)
SHAPES = {"static": UNEVEN, "dynamic": 7}


def requests():
    controls = [
        Controls(),
        Controls(frequency_penalty=0.7, presence_penalty=0.5, repetition_penalty=1.4),
        Controls(min_new_tokens=7, logit_bias={STOP: 2.0}),
        Controls(forced_ids={3: 0, 5: 2}, banned_ids=(1,)),
    ]
    return [
        Request(
            prompt_ids=tuple((i + j) % (VOCAB - 1) for j in range(2 + i)),
            id=(i, temperature),
            max_new_tokens=20 + i,
            temperature=temperature,
            top_p=1.0 if i % 2 else 0.9,
            seed=10 * i,
            stop_ids=(STOP,) if i in (0, 2) else (),
            controls=own,
            top_logprobs=2,
        )
        for temperature in (0.0, 0.9)
        for i, own in enumerate(controls)
    ]


def complete(draft, asked, *, rule="coupled", model=MODEL, batch=3, **options):
    options = {"controls": ControlSpec(True, True, True, True), "n_top": 2} | options
    engine = Engine(
        model,
        drafter=draft,
        rule=verify.by_name(rule),
        batch_size=batch,
        capacity=96,
        **options,
    )
    done = {e.id: e.completion for e in engine.run(asked) if e.completion}
    return [done[request.id] for request in asked]


def texts_of(completions):
    return [(*c.prompt_ids, *c.ids) for c in completions]


@pytest.fixture(scope="module")
def plain():
    return complete(PLAIN, requests())


@pytest.mark.parametrize("shape", SHAPES)
def test_text_and_numbers_are_those_of_plain_decoding(shape, plain):
    draft = planted_trees.grown(SHAPES[shape], VOCAB, texts_of(plain))
    done = complete(draft, requests())
    for a, b in zip(plain, done, strict=True):
        assert (a.ids, a.finish_reason) == (b.ids, b.finish_reason)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        assert [[i for i, _ in row] for row in a.top_logprobs] == [
            [i for i, _ in row] for row in b.top_logprobs
        ]
    assert sum(c.stats.accepted for c in done) > 40
    assert sum(c.stats.passes for c in done) < 0.8 * sum(c.stats.passes for c in plain)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_rows_are_the_same_under_other_rules(shape):
    asked = [r for r in requests() if r.temperature == 0]
    plain = complete(PLAIN, asked)
    draft = planted_trees.grown(SHAPES[shape], VOCAB, texts_of(plain))
    rule = {"static": "rejection", "dynamic": "sample_and_match"}[shape]
    done = complete(draft, asked, rule=rule)
    assert [c.ids for c in done] == [c.ids for c in plain]


def test_a_batch_changes_no_row(plain):
    draft = planted_trees.grown(UNEVEN, VOCAB, texts_of(plain))
    one, three = (complete(draft, requests(), batch=n) for n in (1, 3))
    for a, b in zip(one, three, strict=True):
        assert (a.ids, a.logprobs, a.origins) == (b.ids, b.logprobs, b.origins)
        assert a.stats.accepted_at == b.stats.accepted_at


def test_what_is_counted_is_what_happened(plain):
    draft = planted_trees.grown(UNEVEN, VOCAB, texts_of(plain))
    for completion in complete(draft, requests()):
        stats = completion.stats
        assert len(stats.accepted_at) == UNEVEN.max_depth == 4
        assert sum(stats.accepted_at) == stats.accepted
        assert stats.accepted + stats.passes >= stats.committed == len(completion.ids)
        levels = zip(
            stats.accepted_at, stats.reached_at, stats.verified_at, strict=True
        )
        for accepted, reached, verified in levels:
            assert accepted <= reached <= verified <= stats.passes
        assert np.all(np.diff(stats.accepted_at) <= 0)
        kept = completion.origins.count(Origin.ACCEPTED)
        assert kept <= stats.accepted
        # A bonus follows a leaf, a correction a node whose children were all wrong.
        assert set(completion.origins) <= {
            Origin.ACCEPTED,
            Origin.BONUS,
            Origin.CORRECTION,
            Origin.PLAIN,
        }


def test_a_tree_of_one_branch_is_the_chain(plain):
    """Whoever drafts the truth as a tree gets what the chain gets."""
    right = planted.right(4, VOCAB, texts_of(plain))
    chain = trees.chain(4)

    def propose(params, state, context):
        proposal, state = right.drafter.propose(params, state, context)
        parents = jnp.broadcast_to(jnp.asarray(chain.parents), proposal.tokens.shape)
        return proposal._replace(parents=parents), state

    spec = dataclasses.replace(right.drafter.spec, depth=4, topology=chain)
    as_tree = BoundDrafter(
        right.drafter._replace(spec=spec, propose=propose), right.params
    )
    one, two = (complete(draft, requests()) for draft in (right, as_tree))
    for a, b in zip(one, two, strict=True):
        assert (a.ids, a.logprobs) == (b.ids, b.logprobs)
        # A chain is cut before the limit, a tree after it was verified.
        assert a.origins[:-4] == b.origins[:-4]
        assert a.stats.passes == b.stats.passes


def test_max_drafts_cuts_nodes_and_keeps_the_text(plain):
    draft = planted_trees.grown(UNEVEN, VOCAB, texts_of(plain))
    asked = [dataclasses.replace(r, max_drafts=i % 4) for i, r in enumerate(requests())]
    done = complete(draft, asked)
    assert [c.ids for c in done] == [c.ids for c in plain]
    for request, completion in zip(asked, done, strict=True):
        stats = completion.stats
        assert stats.verified <= request.max_drafts * stats.passes


def test_nan_logits_end_the_row_that_has_them():
    asked = [
        Request(prompt_ids=(0, i), id=i, max_new_tokens=12, seed=i) for i in range(3)
    ]
    plain = complete(PLAIN, asked)
    draft = planted_trees.grown(UNEVEN, VOCAB, texts_of(plain))
    target = planted.nan_target(MODEL.target, positions=(8,))
    spoilt = dataclasses.replace(MODEL, target=target)
    for a, b in zip(plain, complete(draft, asked, model=spoilt), strict=True):
        assert b.ids == a.ids[:6] and "not finite" in b.error


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_retrieval_as_trees_on_a_decoder(dtype):
    """Logits round otherwise at other slots: near ties aside the text is the same."""
    model = tiny_model(3, vocab_size=13, dtype=dtype)
    rng = np.random.default_rng(0)
    asked = [
        Request(
            prompt_ids=tuple(rng.integers(0, 13, 20).tolist()),
            id=i,
            max_new_tokens=40,
            temperature=0.5 * (i % 2),
            seed=i,
        )
        for i in range(4)
    ]
    options = dict(model=model, controls=None, n_top=0)
    plain = complete(PLAIN, asked, **options)
    tree = trees.sequoia([0.5, 0.2, 0.1], n_nodes=7)
    zoo = {
        "suffix": drafters.suffix(4, min_match=1, n_nodes=6),
        "recycling": drafters.token_recycling(13, tree),
    }
    for name, draft in zoo.items():
        done = complete(draft, asked, **options)
        same = sum(a.ids == b.ids for a, b in zip(plain, done, strict=True))
        assert same == 4 if dtype == "float32" else same >= 2, name
        assert sum(c.stats.accepted for c in done) > 20, name


def test_pairs_that_do_not_go_together_say_why():
    draft = planted_trees.grown(UNEVEN, VOCAB, [])
    with pytest.raises(ValueError, match="exact=True needs a drafter of chains"):
        complete(draft, [], exact=True)
    with pytest.raises(ValueError, match="'block' .*chain"):
        complete(draft, [], rule="block")
    flat = MODEL.target._replace(gather_path=None)
    with pytest.raises(ValueError, match="scores chains only"):
        complete(draft, [], model=dataclasses.replace(MODEL, target=flat))
    table = jnp.zeros((VOCAB, VOCAB))
    drawn = planted_trees.drawn(UNEVEN, table, siblings="without_replacement")
    with pytest.raises(ValueError, match="'rejection'"):
        complete(drawn, [], rule="rejection")
    with pytest.raises(ValueError, match="chains"):
        drafters.adaptive(draft, drafters.PassCosts(0.1, (1.0,) * 9))


def test_table_targets_follow_trees():
    """The table model itself: each path is scored as a chain."""
    rng = np.random.default_rng(0)
    model = table_model(rng.normal(size=(VOCAB,) * 3))
    cache = model.target.init_cache(1, 32)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (1, 9)), jnp.int32)
    logits, _, _ = model.target.forward(
        model.params, tokens, cache, layout=trees.pass_layout(UNEVEN)
    )
    for rows in ([0, 1, 3, 6, 7], [0, 2, 5], [0, 8]):
        chain, _, _ = model.target.forward(model.params, tokens[:, rows], cache)
        np.testing.assert_array_equal(logits[:, rows], chain)
