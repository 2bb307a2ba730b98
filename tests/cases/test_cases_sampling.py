"""Replays of reports: sampling correctness."""

import dataclasses

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import assert_same

from specjax import decode, verify
from specjax.decode import Request, Status
from specjax.drafters import DraftContext
from specjax.sampling import Settings, warp
from specjax.testing import planted
from specjax.testing.oracle import g_test, rule_law, target_law, total_variation
from specjax.testing.tables import constant_table, sampled_drafts

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("cases_sampling")

VOCAB = chains.VOCAB


def test_steep_bfloat16_logits_are_declared_as_they_are_drawn():
    """DeepSpec #31: steep bfloat16 logits, drawn and declared in two precisions."""
    rng = np.random.default_rng(3)
    logits = jnp.asarray(12 * rng.normal(size=(8, 8)), jnp.bfloat16)
    table = jax.nn.log_softmax(logits.astype(jnp.float32))
    draft = planted.sampled(2, table)
    n = 20_000
    context = DraftContext(
        history=jnp.full((n, 4), 5, jnp.int32),
        length=jnp.full((n,), 2, jnp.int32),
        settings=Settings.full(n)._replace(seed=jnp.arange(n, dtype=jnp.uint32)),
        features=None,
        n_new=jnp.ones((n,), jnp.int32),
    )
    proposal, _ = jax.jit(draft.drafter.propose)(draft.params, (), context)
    assert proposal.logprobs.dtype == jnp.float32
    first, second = np.asarray(proposal.tokens).T
    # Bit for bit the rows that the tokens were drawn from.
    np.testing.assert_array_equal(proposal.logprobs[:, 0], table[jnp.full(n, 5)])
    np.testing.assert_array_equal(proposal.logprobs[:, 1], table[first])
    q = np.exp(np.asarray(table[5], np.float64))
    assert g_test(np.bincount(first, minlength=8), q / q.sum()) > 1e-4

    # The rule's law: right so, and wrong where the ratio is taken of another array.
    steep = np.asarray([20.3, 19.9, 19.4, 6.1])
    rounded = np.asarray(jnp.asarray(steep, jnp.bfloat16), np.float64)
    law = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    table = constant_table(law(steep[[1, 0, 2, 3]]), law(rounded), depth=2)
    drafts, wanted = sampled_drafts(table, 1), target_law(table, 2)
    mixed = drafts._replace(logprobs=np.log(law(steep))[None, None].repeat(4, 0))
    for declared, least, most in ((drafts, 0, 1e-6), (mixed, 1e-3, 1)):
        got = rule_law(verify.rejection, table, 1, drafts=declared).tokens
        assert least <= total_variation(got, wanted) < most


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_order_of_filters_in_every_path(rule):
    """SGLang #36173: p = (.35, .25, .20, .05, .03, ...), k = 4, top_p = .82."""
    p = np.full(VOCAB, 1e-30)
    p[:8] = (0.35, 0.25, 0.20, 0.05, 0.03, 0.04, 0.04, 0.04)
    model = chains.model(logits=np.tile(np.log(p), (VOCAB, 1)))
    base = Request(prompt_ids=(9,), max_new_tokens=60, temperature=1.0)
    requests = [dataclasses.replace(base, seed=s, top_k=4, top_p=0.82) for s in (1, 2)]
    requests += [dataclasses.replace(base, seed=3, top_k=4)]
    for draft in (
        planted.silent(4, VOCAB),  # plain
        planted.constant(4, VOCAB, (3, 3, 3, 3)),  # rejected under both filters
        planted.constant(4, VOCAB, (2, 1, 0, 3)),
        planted.hashed(4, VOCAB),
    ):
        # Rejection not in exact mode: it has a narrow and a wide path.
        paths = dict(exact=False, width=None) if rule == "rejection" else {}
        done = chains.decode(model, requests, draft, rule=rule, **paths)
        for completion in done[:2]:
            assert set(completion.ids) == {0, 1, 2}
        assert set(done[2].ids) == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_one_nan_row_of_four_is_flagged_and_alone(rule):
    """vLLM #53029, #45060, #21876: one row of NaN in a batch of 4."""
    model = chains.model((20, 21, 22, 23, 24), scale=1.0)
    table = np.array(model.params["logits"])
    table[22] = np.nan
    table[:, 22] -= 50
    table[21, 22] += 100
    model = dataclasses.replace(model, params={"logits": jnp.asarray(table)})
    starts = (3, 4, 20, 5)
    requests = [
        Request(prompt_ids=(i,), max_new_tokens=12, temperature=0.7, seed=i)
        for i in starts
    ]
    others = [r for r in requests if r.prompt_ids != (20,)]
    draft = planted.constant(4, VOCAB, (21, 22, 23, 24))
    clean = chains.decode(model, others, draft, rule=rule)
    a, b, bad, c = chains.decode(model, requests, draft, rule=rule)
    assert_same([a, b, c], clean)
    assert bad.finish_reason == "error" and "position 3" in bad.error
    assert bad.ids == (21, 22)
    for done in (a, b, c):
        assert done.finish_reason == "length" and len(done.ids) == 12
        assert all(0 <= i < VOCAB for i in done.ids)


def test_a_draft_law_travels_with_its_row():
    """vLLM #16899, #20459: rows permuted and dropped between draft and verify."""
    model = chains.model(scale=1.5)
    other = np.random.default_rng(1).normal(size=(VOCAB, VOCAB))
    draft = planted.sampled(4, jax.nn.log_softmax(jnp.asarray(other, jnp.float32)))
    parts = dict(target=model.target, drafter=draft.drafter)
    state = decode.init_state(
        **parts, batch=4, capacity=60, n_stop_ids=1,
        controls=decode.Controls().spec, n_top=0,
    )  # fmt: skip
    state = state.replace(
        tokens=state.tokens.at[:, 0].set(jnp.asarray([1, 2, 3, 4])),
        length=state.length + 1,
        limit=state.limit + 50,
        max_drafts=state.max_drafts + 50,
        status=state.status + int(Status.RUNNING),
        settings=Settings.full(4, temperature=1.0)._replace(
            seed=jnp.arange(4, dtype=jnp.uint32)
        ),
    )

    @jax.jit
    def propose(params, state):
        return decode.draft(None, params, state, **parts)

    @jax.jit
    def score(params, state, proposal):
        return decode.verify_and_commit(
            params, draft.params, state, proposal,
            **parts, rule=verify.rejection, width=5,
        )[0]  # fmt: skip

    order = np.asarray([2, 0, 3, 1])
    move = lambda tree: jax.tree.map(lambda x: x[order], tree)
    seen = set()
    for _ in range(4):
        proposal, state = propose(draft.params, state)
        after = score(model.params, state, proposal)
        moved = score(model.params, move(state), move(proposal))
        jax.tree.map(
            np.testing.assert_array_equal,
            moved,
            move(after),
        )
        # Row 1 is gone before its drafts are looked at.
        dropped = state.replace(status=state.status.at[1].set(int(Status.EMPTY)))
        dropped = score(model.params, dropped, proposal)
        others = np.asarray([0, 2, 3])
        np.testing.assert_array_equal(dropped.tokens[others], after.tokens[others])
        np.testing.assert_array_equal(dropped.length[others], after.length[others])
        assert dropped.length[1] == state.length[1]
        # It is no empty comparison: another row's law changes what is accepted.
        laws = proposal._replace(logprobs=proposal.logprobs[order])
        stale = score(model.params, state, laws)
        seen.add(bool(np.all(stale.tokens == after.tokens)))
        state = after
    assert False in seen and int(state.stats.accepted.sum()) > 0


@pytest.mark.parametrize("top_k", [1, 20])
def test_a_draft_truncated_as_the_target_is_accepted_more(top_k):
    """vLLM #56724: T = 1, top_k 1 and 20, a draft that does not know of it."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(VOCAB, VOCAB))
    model = chains.model(logits=2 * logits)
    own = jnp.asarray(2 * logits + 0.3 * rng.normal(size=logits.shape), jnp.float32)
    cut = warp(own[:, None], Settings.full(VOCAB, temperature=1.0, top_k=top_k))[:, 0]
    requests = [
        Request(
            prompt_ids=(i,), max_new_tokens=80, temperature=1.0, seed=i, top_k=top_k
        )
        for i in range(4)
    ]
    accepted = {}
    wanted = chains.decode(model, requests)
    for name, law in (("whole", own), ("cut", cut)):
        draft = planted.sampled(4, jax.nn.log_softmax(law))
        done = chains.decode(model, requests, draft, **chains.NOTHING)
        assert_same(done, wanted)
        accepted[name] = sum(c.stats.accepted for c in done)
        for completion in done:
            text = (*completion.prompt_ids, *completion.ids)
            for a, b in zip(text, text[1:], strict=False):
                assert b in np.argsort(-logits[a])[:top_k]
    assert accepted["cut"] > accepted["whole"] > 0
