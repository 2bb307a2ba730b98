"""Replays of reports: penalties, processors, grammar; ends, stops and lengths."""

import dataclasses
import json

import chains
import numpy as np
import pytest
from decode_helpers import assert_same

from specjax.decode import Controls, Origin, Request
from specjax.testing import planted

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("cases_settings")

VOCAB, EOS, JSON = chains.VOCAB, chains.EOS, chains.JSON
TOKENIZER = chains.model().need_tokenizer()


def _whole(request, done):
    return (*request.prompt_ids, *done.ids)


def test_penalties_and_least_length_count_every_accepted_token():
    """SGLang #33643: 3 accepted a step, frequency .5, min_new_tokens 8."""
    # The favourite of every token leads to the end id or back to a few others, so
    # that the counts decide.
    model = chains.model(scale=1.0, eos_ids=(EOS,))
    table = np.array(model.params["logits"])
    table[:, [10, 11, 12]] += (5.2, 4.9, 4.6)
    table[:, EOS] += 4.0
    model = chains.model(logits=table, eos_ids=(EOS,))
    controls = Controls(frequency_penalty=0.5, min_new_tokens=8)
    request = Request(prompt_ids=(7,), max_new_tokens=24, controls=controls)
    ids, reason = chains.plain(model, request)
    free, _ = chains.plain(model, dataclasses.replace(request, controls=Controls()))
    assert ids[: len(free)] != free and len(ids) >= 8 and reason == "stop"
    (off,) = chains.decode(model, [request])
    assert (off.ids, off.finish_reason) == (ids, reason)
    (on,) = chains.decode(
        model,
        [request],
        chains.limited(3, "right", _whole(request, off)),
        **chains.COUNTED,
    )
    assert_same([on], [off])
    assert on.stats.accepted_at[2] >= on.stats.passes - 1 > 0
    assert on.stats.verified_at[3] == 0


@pytest.mark.parametrize("most", [2, 8, 48])
def test_penalty_counts_hold_committed_tokens_only(most):
    """vmlx-swift #357: presence .6 with drafts of 2, 8 and 48."""
    model = chains.model(scale=1.0)
    requests = [
        Request(
            prompt_ids=(i, i + 1), max_new_tokens=60,
            controls=Controls(presence_penalty=0.6),
        )
        for i in (1, 5, 9)
    ]  # fmt: skip
    texts = [(*r.prompt_ids, *chains.plain(model, r)[0]) for r in requests]
    for name in ("partly_right", "wrong"):
        draft = chains.limited(most, name, *texts)
        for request, done in zip(
            requests,
            chains.decode(model, requests, draft, **chains.COUNTED),
            strict=True,
        ):
            assert done.ids == chains.plain(model, request)[0]
            assert done.stats.verified > done.stats.accepted
            assert (done.stats.accepted > 0) == (name == "partly_right")


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_bans_and_min_p_hold_at_every_position(rule, at):
    """vLLM #42744, #42802, #38202: the banned token is drafted, at each position."""
    model = chains.model((20, 21, 22, 23, 24, 20), scale=1.0)
    table = np.array(model.params["logits"])
    banned, rare = 50, 51
    table[:, banned] = table.max(axis=1) + 3  # what the target wants most
    table[:, rare] = table[:, :50].max(axis=1) - 2.5  # below a fifth of the best
    model = chains.model(logits=table)
    bias = Controls(logit_bias={banned: -np.inf})
    base = Request(prompt_ids=(20,), max_new_tokens=24, controls=bias)
    requests = [
        base,
        dataclasses.replace(base, temperature=1.0, seed=1),
        dataclasses.replace(base, temperature=1.0, seed=2, min_p=0.2),
    ]
    for bad in (banned, rare):
        drafts = [21, 22, 23, 24]
        drafts[at] = bad
        draft = planted.constant(4, VOCAB, drafts)
        done = chains.decode(model, requests, draft, rule=rule)
        for completion in done:
            assert banned not in completion.ids
            assert completion.stats.verified_at[at] > 0
        assert done[0].ids == chains.plain(model, base)[0]
        assert rare not in done[2].ids
        assert at == 0 or done[0].stats.accepted_at[at - 1] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_closes_inside_a_block(temperature):
    """openvino.genai #4081, vLLM #53777, SGLang #21723: JSON closes, drafts go on."""
    encode = TOKENIZER.encode
    model = chains.model(encode('{"a":1}'), scale=0.5)
    requests = [
        Request(
            prompt_ids=(3,), max_new_tokens=30, seed=seed, temperature=temperature,
            stop_ids=(EOS,), controls=Controls(token_mask=JSON),
        )
        for seed in range(4)
    ]  # fmt: skip
    off = chains.decode(model, requests)
    if temperature == 0:
        assert off[0].ids == chains.plain(model, requests[0])[0]
    tails = (encode(',"a":2}'), encode("}}}}"), [EOS, *encode('{"a"')])
    for tail in tails:
        # The drafts know the text up to its last brace, and then go on without it.
        texts = [
            (*r.prompt_ids, *d.ids[:-1], *tail)
            for r, d in zip(requests, off, strict=True)
        ]
        on = chains.decode(model, requests, chains.right(4, *texts))
        assert_same(on, off)
    for done in on:
        assert done.finish_reason == "stop" and done.ids[-1] == EOS
        assert set(json.loads(TOKENIZER.decode(done.ids[:-1]))) == {"a"}
        assert done.stats.accepted > 0


STOP = 77


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_stop_before_the_cap_and_one_beyond(rule):
    """SGLang #31599, #33758: [10, 11, STOP, 20, 21, 22], at most 5 tokens."""
    run = (1, 10, 11, STOP, 20, 21, 22)
    model = chains.model(run)
    base = Request(prompt_ids=(1,), max_new_tokens=5, stop_ids=(STOP,))
    beyond = dataclasses.replace(base, stop_ids=(22,))
    for draft in (None, chains.right(4, run), planted.wrong(4, VOCAB, [run])):
        hit, cap = chains.decode(model, [base, beyond], draft, rule=rule)
        assert (hit.ids, hit.finish_reason) == ((10, 11, STOP), "stop")
        assert (cap.ids, cap.finish_reason) == ((10, 11, STOP, 20, 21), "length")


def test_a_stop_string_trims_text_ids_and_both_logprobs():
    """vLLM #47616: a stop string inside a block, two logprobs a token."""
    run = (1, *TOKENIZER.encode("abc_END.defg"))
    model = chains.model(run)
    request = Request(prompt_ids=(1,), max_new_tokens=12, stop=("END",), top_logprobs=2)
    free = dataclasses.replace(request, stop=())
    (whole,) = chains.decode(model, [free])
    for draft in (None, chains.right(4, run)):
        (done,) = chains.decode(model, [request], draft)
        assert (done.text, done.finish_reason) == ("abc_", "stop")
        n = len(done.ids)
        assert TOKENIZER.decode(done.ids) == done.text and n == 4
        assert len(done.logprobs) == len(done.top_logprobs) == len(done.origins) == n
        assert done.ids == whole.ids[:n] and done.logprobs == whole.logprobs[:n]
        assert done.top_logprobs == whole.top_logprobs[:n]
        for token, own, tops in zip(
            done.ids, done.logprobs, done.top_logprobs, strict=True
        ):
            assert len(tops) == 2 and tops[0] == (token, pytest.approx(own))


def test_counts_by_category_never_exceed_the_total():
    """SGLang #39826: tokens counted by where they came from, across an end id."""
    run = (1, 10, 11, STOP, 20, 21, 22)
    model = chains.model(run, eos_ids=(STOP,))
    requests = [
        Request(prompt_ids=(1,), max_new_tokens=n, ignore_eos=n == 6)
        for n in (1, 2, 5, 6)
    ]
    for draft in (
        None,
        chains.right(4, run),
        planted.partly_right(4, VOCAB, [run]),
        planted.wrong(4, VOCAB, [run]),
    ):
        for done in chains.decode(model, requests, draft):
            by_origin = {o: done.origins.count(o) for o in Origin}
            assert sum(by_origin.values()) == len(done.ids) == done.stats.committed
            assert by_origin[Origin.PROMPT] == 0
            assert by_origin[Origin.ACCEPTED] <= done.stats.accepted
            assert done.stats.accepted <= done.stats.verified
            assert sum(done.stats.accepted_at) == done.stats.accepted
