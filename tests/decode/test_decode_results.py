"""What comes back: definitions of the counters, log-probabilities, origins, text."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from decode_helpers import (
    CAPACITY,
    GAMMA,
    MODEL,
    VOCAB,
    logits_of,
    make_engine,
    mixed_requests,
    run,
    texts_of,
)

import specjax
from specjax import decode, verify
from specjax.decode import Origin, Stats, Status
from specjax.drafters import prompt_lookup
from specjax.testing import planted

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_results")

FIXED = dict(gamma=GAMMA, exact=True, batch_size=3, capacity=CAPACITY)


@pytest.fixture(scope="module")
def generation():
    return specjax.generate(
        MODEL,
        ["abcabcabcabc", "hello hello hello", "x"],
        temperature=[0.0, 0.3, 0.8],
        seed=[1, 2, 3],
        max_new_tokens=40,
        **FIXED,
    )


def test_a_generation_is_a_sequence(generation):
    assert len(generation) == 3
    assert list(generation) == [generation[0], generation[1], generation[2]]
    assert generation[-1] is generation.completions[2]
    assert generation[:2] == generation.completions[:2]
    assert generation[1] in generation
    assert [c.id for c in generation] == [0, 1, 2]
    assert generation.seconds > 0
    with pytest.raises(IndexError):
        generation[3]


def test_texts_are_the_ids_decoded(generation):
    for completion, pieces in zip(generation, generation.pieces, strict=True):
        assert completion.text == MODEL.tokenizer.decode(completion.ids)
        assert "".join(pieces) == completion.text
        assert len(pieces) == len(completion.ids) == len(completion.origins)
        assert len(completion.logprobs) == len(completion.ids) == 40
    assert generation.texts == [c.text for c in generation]
    assert generation[0].prompt_ids == tuple(MODEL.tokenizer.encode("abcabcabcabc"))


def test_log_probabilities_are_the_targets_own():
    """Of the raw logits, whatever the warp, from one pass over the whole text."""
    requests = mixed_requests()
    draft = planted.partly_right(GAMMA, VOCAB, texts_of(run(requests)))
    for request, completion in zip(requests, run(requests, draft=draft), strict=True):
        n = len(request.prompt_ids)
        logits = logits_of(MODEL, (*request.prompt_ids, *completion.ids))[n - 1 : -1]
        wanted = np.asarray(jax.nn.log_softmax(logits))
        wanted = wanted[np.arange(len(completion.ids)), list(completion.ids)]
        np.testing.assert_allclose(completion.logprobs, wanted, atol=1e-4)


def test_origins_and_counters_tell_the_same_story(generation):
    for completion in generation:
        stats, origins = completion.stats, np.asarray(completion.origins)
        assert stats.committed == len(completion.ids)
        # Nothing was cut off, so every accepted draft is in the text.
        assert np.sum(origins == Origin.ACCEPTED) == stats.accepted
        others = np.sum(origins != Origin.ACCEPTED)
        assert others == stats.passes
        assert stats.committed == stats.accepted + stats.passes
        assert Origin.PROMPT not in origins
        assert stats.accepted <= stats.verified
        assert sum(stats.accepted_at) == stats.accepted
        assert sum(stats.verified_at) == stats.verified
        assert list(stats.accepted_at) == sorted(stats.accepted_at, reverse=True)
        assert 1 <= stats.tokens_per_pass <= GAMMA + 1
        assert stats.tokens_per_pass == stats.committed / stats.passes
        assert stats.wide_passes == stats.passes  # exact: every pass is wide
        # A run of accepted drafts ends in the rule's token, named after its end.
        n_accepted = 0
        for origin in origins:
            if origin == Origin.ACCEPTED:
                n_accepted += 1
                continue
            assert origin != Origin.PLAIN or n_accepted == 0
            assert origin != Origin.BONUS or n_accepted > 0
            n_accepted = 0


def test_totals_are_sums(generation):
    total, parts = generation.stats, [c.stats for c in generation]
    for field in ("passes", "wide_passes", "verified", "accepted", "committed"):
        assert getattr(total, field) == sum(getattr(p, field) for p in parts)
    for j in range(GAMMA):
        assert total.accepted_at[j] == sum(p.accepted_at[j] for p in parts)
    record = total.as_dict()
    assert record["tokens_per_pass"] == pytest.approx(total.tokens_per_pass, abs=1e-4)
    assert Stats.total([]).passes == 0


def test_totals_over_different_gammas():
    a = Stats(2, 2, 4, 3, 5, (2, 2), (2, 2), (2, 1))
    b = Stats(3, 1, 1, 1, 4, (1,), (1,), (1,))
    assert Stats.total([a, b]) == Stats(5, 3, 5, 4, 9, (3, 2), (3, 2), (3, 1))


def test_fractions_of_nothing_are_nan():
    nothing = Stats(0, 0, 0, 0, 0, (), (), ())
    assert math.isnan(nothing.tokens_per_pass) and math.isnan(nothing.accepted_fraction)
    assert nothing.acceptance_at == ()
    idle = Stats(3, 0, 0, 0, 3, (0, 0), (0, 0), (0, 0))
    assert all(math.isnan(a) for a in idle.acceptance_at)
    assert idle.as_dict()["tokens_per_pass"] == 1.0


def test_acceptance_at_when_every_pass_drafts_gamma():
    stats = Stats(10, 10, 30, 13, 23, (10, 10, 10), (10, 8, 4), (8, 4, 1))
    assert stats.acceptance_at == (0.8, 0.5, 0.25)


def _passes(draft, request):
    """Makes one request's passes one by one: (n_valid, n_accepted) of each."""
    drafter = draft.drafter
    engine = make_engine(draft=draft, batch=1)
    engine.submit(request)
    engine.admit()
    state = engine._state

    @jax.jit
    def step(params, draft_params, state):
        return decode.spec_step(
            params,
            draft_params,
            state,
            target=MODEL.target,
            drafter=drafter,
            rule=verify.coupled,
            widths=(GAMMA + 1,),
        )

    seen = []
    while state.status[0] == Status.RUNNING:
        state, info = step(MODEL.params, draft.params, state)
        seen.append((int(info.proposal.n_valid[0]), int(info.verdict.n_accepted[0])))
    return seen, Stats.of_row(jax.device_get(state.stats), 0)


def test_acceptance_at_when_passes_draft_different_lengths():
    """Of the drafts whose predecessors were all accepted, those accepted too."""
    request = dataclasses.replace(mixed_requests()[0], max_new_tokens=60)
    draft = planted.hashed(GAMMA, VOCAB, texts_of(run([request])))
    seen, stats = _passes(draft, request)
    assert len({n_valid for n_valid, _ in seen}) == GAMMA + 1
    assert stats.verified == sum(n_valid for n_valid, _ in seen)
    assert stats.accepted == sum(n for _, n in seen)
    for j, acceptance in enumerate(stats.acceptance_at):
        reached = [(v, n) for v, n in seen if v > j and n >= j]
        accepted = sum(n > j for _, n in reached)
        assert acceptance == pytest.approx(accepted / len(reached)), j


@pytest.mark.parametrize("prompt", ["abcabcabcabc", [9, 8, 9, 8], "é → 你好"])
def test_stream_gives_the_text_of_generate(prompt):
    settings = dict(temperature=0.6, top_p=0.95, seed=4, max_new_tokens=40)
    settings |= dict(gamma=GAMMA, exact=True)
    (whole,) = specjax.generate(MODEL, prompt, **settings)
    pieces = specjax.stream(MODEL, prompt, **settings)
    texts = []
    while True:
        try:
            texts.append(next(pieces))
        except StopIteration as end:
            completion = end.value
            break
    assert len(texts) > 1 and "" not in texts
    assert "".join(texts) == whole.text == completion.text
    assert completion.ids == whole.ids


def test_a_prompt_is_text_or_ids_alone_or_in_a_list():
    ids = MODEL.tokenizer.encode("abab")
    settings = dict(max_new_tokens=5, **FIXED)
    (wanted,) = specjax.generate(MODEL, "abab", **settings)
    for prompt in (
        ids,
        tuple(ids),
        np.asarray(ids),
        ["abab"],
        [ids],
        np.asarray([ids]),
    ):
        (got,) = specjax.generate(MODEL, prompt, **settings)
        assert (got.prompt_ids, got.ids) == (wanted.prompt_ids, wanted.ids)


def test_none_is_plain_decoding():
    settings = dict(max_new_tokens=9, exact=True, width=5, batch_size=3)
    settings["capacity"] = CAPACITY
    (off,) = specjax.generate(MODEL, "ababab", drafter=None, **settings)
    (on,) = specjax.generate(MODEL, "ababab", drafter=prompt_lookup(GAMMA), **settings)
    assert off.ids == on.ids and off.logprobs == on.logprobs
    assert set(off.origins) == {Origin.PLAIN}
    assert off.stats.verified == 0 and off.stats.tokens_per_pass == 1.0
