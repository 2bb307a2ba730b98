"""Request settings on drafted tokens: the same as in plain decoding, id for id."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from decode_helpers import (
    CAPACITY,
    GAMMA,
    MODEL,
    VOCAB,
    assert_same,
    drain,
    logits_of,
    make_engine,
    run,
    texts_of,
)

import specjax
from specjax import drafters, verify
from specjax.decode import Controls, Engine, Request, union_masks, union_spec
from specjax.drafters import BoundDrafter
from specjax.sampling import ControlSpec
from specjax.testing import planted, tiny_model
from specjax.testing.reference_controls import controlled_logits
from specjax.text import TokenMask

# One worker: the tests share compiled programs.
pytestmark = pytest.mark.xdist_group("decode_controls")

EOS = 255
LOSSY, PLANTED = ("relaxed", "lenient"), ("partly_right", "hashed")


def _mask(n_states=5):
    """A random constraint whose last state is the only one that allows the end id."""
    rng = np.random.default_rng(1)
    table = rng.integers(0, n_states, (n_states, VOCAB)).astype(np.int32)
    table[rng.random(table.shape) < 0.6] = -1
    table[:-1, EOS], table[-1, EOS] = -1, 0
    return TokenMask(table, 0, "random")


MASK = _mask()
PENALTIES = dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
KINDS = [
    Controls(),
    Controls(**PENALTIES),
    Controls(logit_bias={3: 4.0, 7: 3.0, 9: -np.inf}, banned_ids=(177, 4)),
    Controls(forced_ids={0: 9, 5: 11, 6: 12}),
    Controls(min_new_tokens=9, logit_bias={EOS: 8.0}),
    Controls(token_mask=MASK),
    Controls(
        **PENALTIES,
        logit_bias={3: 4.0},
        banned_ids=(177,),
        min_new_tokens=6,
        token_mask=MASK,
    ),
]
KINDS.append(KINDS[-1])
TEMPERATURES = (0.8, 0.0, 0.8, 0.0, 0.8, 0.0, 0.0, 0.8)
EVERYTHING = dict(controls=union_spec(KINDS), token_masks=union_masks(KINDS), n_top=4)
REQUESTS = [
    Request(
        prompt_ids=tuple([5 + i, 6, 7 + i, 5 + i, 6, 7 + i]),
        max_new_tokens=24,
        controls=controls,
        temperature=temperature,
        seed=i,
        stop_ids=(EOS,),
        top_logprobs=i % 5,
    )
    for i, (controls, temperature) in enumerate(zip(KINDS, TEMPERATURES, strict=True))
]


@functools.cache
def _plain():
    return run(REQUESTS, **EVERYTHING)


@functools.cache
def _whole_logits(i):
    completion = _plain()[i]
    return logits_of(MODEL, (*completion.prompt_ids, *completion.ids))


@pytest.mark.parametrize(
    "drafter",
    ["lookup", *(pytest.param(d, marks=pytest.mark.slow) for d in PLANTED)],
)
def test_speculation_changes_nothing_under_any_settings(drafter):
    if drafter == "lookup":
        draft = BoundDrafter(drafters.prompt_lookup(GAMMA, min_ngram=1), None)
    else:
        draft = getattr(planted, drafter)(GAMMA, VOCAB, texts_of(_plain()))
    got = run(REQUESTS, draft=draft, **EVERYTHING)
    assert_same(got, _plain())
    assert [c.top_logprobs for c in got] == [c.top_logprobs for c in _plain()]
    if drafter != "lookup":
        assert sum(c.stats.accepted for c in got) > 50


def test_plain_ids_are_what_the_settings_ask_for():
    for i, (request, done) in enumerate(zip(REQUESTS, _plain(), strict=True)):
        logits = _whole_logits(i)[len(request.prompt_ids) - 1 :]
        for at, token in enumerate(done.ids):
            allowed = controlled_logits(
                logits[at],
                request.controls,
                prompt_ids=request.prompt_ids,
                output_ids=done.ids[:at],
                stop_ids=request.stop_ids,
            )
            assert allowed[token] > -np.inf
            if request.temperature == 0:
                assert allowed[token] > allowed.max() - 1e-5


def test_every_control_has_an_effect():
    without = [dataclasses.replace(r, controls=Controls()) for r in REQUESTS]
    free = run(without, **EVERYTHING)
    for request, a, b in zip(REQUESTS, free, _plain(), strict=True):
        assert (a.ids == b.ids) == (request.controls == Controls())


def test_a_row_does_not_depend_on_its_neighbours_controls():
    for i in (1, 5, 7):
        engine = make_engine(batch=1, **EVERYTHING)
        assert_same(drain(engine, [REQUESTS[i]]), [_plain()[i]])


@pytest.mark.parametrize("rule", ["rejection", "block", "sample_and_match"])
def test_rules_in_law_obey_the_settings(rule):
    # Every draft is an attempt to break a rule.
    draft = planted.hashed(GAMMA, VOCAB)
    for request, done in zip(
        REQUESTS, run(REQUESTS, draft=draft, rule=rule, **EVERYTHING), strict=True
    ):
        controls = request.controls
        assert not set(done.ids) & set(controls.banned_ids)
        for at, token in controls.forced_ids.items():
            assert done.ids[at] == token
        assert EOS not in done.ids[: controls.min_new_tokens]
        if controls.token_mask is not None:
            controls.token_mask.advance(done.ids)


@pytest.mark.parametrize(
    "rule", ["typical", *(pytest.param(r, marks=pytest.mark.slow) for r in LOSSY)]
)
def test_lossy_rules_obey_bans_and_constraints(rule):
    draft = planted.partly_right(GAMMA, VOCAB, texts_of(_plain()))
    got = run(REQUESTS, draft=draft, rule=rule, **EVERYTHING)
    for request, done in zip(REQUESTS, got, strict=True):
        assert not set(done.ids) & set(request.controls.banned_ids)
        if request.controls.token_mask is not None:
            request.controls.token_mask.advance(done.ids)


def test_judge_sees_features_and_keeps_what_it_approves():
    approve = lambda features, tokens: jnp.where(
        jnp.all(jnp.isfinite(features.last[:, 1:]), axis=-1), 1.0, 0.0
    )
    draft = planted.constant(GAMMA, VOCAB, (1, 2, 3, 4))
    engine = Engine(
        MODEL,
        drafter=draft.drafter,
        rule=verify.judge(approve, 0.5),
        batch_size=1,
        capacity=CAPACITY,
        draft_params=draft.params,
    )
    (done,) = drain(engine, [Request(prompt_ids=(7, 8, 9), max_new_tokens=5)])
    assert done.ids[:4] == (1, 2, 3, 4)


def test_logprobs_are_the_targets_own_whatever_the_settings():
    for i, done in enumerate(_plain()):
        logits = _whole_logits(i)[len(done.prompt_ids) - 1 :][: len(done.ids)]
        own = logits.astype(np.float64)
        own -= np.log(np.exp(own).sum(-1, keepdims=True))
        np.testing.assert_allclose(
            done.logprobs, own[np.arange(len(done.ids)), list(done.ids)], atol=1e-4
        )
        n_top = REQUESTS[i].top_logprobs
        assert len(done.top_logprobs) == (len(done.ids) if n_top else 0)
        for at, alternatives in enumerate(done.top_logprobs):
            assert len(alternatives) == n_top
            best = np.sort(own[at])[::-1][:n_top]
            np.testing.assert_allclose([p for _, p in alternatives], best, atol=1e-4)
            np.testing.assert_allclose(
                own[at][[i for i, _ in alternatives]], best, atol=1e-4
            )


def test_least_length_holds_back_stop_strings_too():
    free = run([Request(prompt_ids=(5, 6, 7), max_new_tokens=20)])[0]
    tokenizer = MODEL.need_tokenizer()
    stop = tokenizer.decode([free.ids[2]])
    request = Request(prompt_ids=(5, 6, 7), max_new_tokens=20, stop=(stop,))
    assert len(run([request])[0].ids) <= 2
    for least in (3, 8):
        held = dataclasses.replace(request, controls=Controls(min_new_tokens=least))
        (done,) = run([held], controls=ControlSpec(min_new=True))
        assert len(done.ids) >= least
        assert stop not in done.text[len(tokenizer.decode(done.ids[:least])) :]


def test_constrained_text_ends_by_its_end_id():
    model = tiny_model(2, eos_ids=(EOS,))
    mask = TokenMask.from_regex(
        "(yes|no|maybe)( and (yes|no))?", model.need_tokenizer(), (EOS,)
    )
    prompts = [[7, 8, 9], [1, 2], [40, 41, 42, 43]]
    texts = set()
    for seed in range(3):
        out = specjax.generate(
            model,
            prompts,
            controls=Controls(token_mask=mask),
            temperature=1.0,
            seed=seed,
            capacity=CAPACITY,
            max_new_tokens=40,
        )
        assert all(c.finish_reason == "stop" for c in out)
        texts |= {model.need_tokenizer().decode(c.ids[:-1]) for c in out}
    allowed = {f"{a}{b}" for a in ("yes", "no", "maybe") for b in ("", " and yes")}
    allowed |= {f"{a} and no" for a in ("yes", "no", "maybe")}
    assert texts <= allowed and len(texts) > 2


def test_controls_that_exclude_one_another_end_the_row_and_no_other():
    only = TokenMask.from_allowed((3, EOS), VOCAB)
    clash = Controls(token_mask=only, banned_ids=(3,), min_new_tokens=2)
    fine = Request(prompt_ids=(5, 6), max_new_tokens=6, stop_ids=(EOS,))
    options = dict(controls=union_spec([clash]), token_masks=(only,))
    requests = [fine, dataclasses.replace(fine, controls=clash), fine]
    a, b, c = run(requests, **options)
    assert b.finish_reason == "error" and b.ids == ()
    assert "leave no token for position 2 (token 0 of the output)" in b.error
    assert_same([a, c], run([fine, fine]))


def test_samples_share_a_prefill_and_equal_single_runs():
    alone = [
        specjax.generate(
            MODEL, [[5, 6, 7] * 9], temperature=1.0, seed=s, max_new_tokens=12,
            capacity=CAPACITY, exact=True, batch_size=2,
        )[0]
        for s in (2**32 - 1, 0, 1)
    ]  # fmt: skip
    out = specjax.generate(
        MODEL, [[5, 6, 7] * 9, [1, 2]], temperature=1.0, seed=2**32 - 1, n=3,
        max_new_tokens=12, capacity=CAPACITY, exact=True, batch_size=2,
    )  # fmt: skip
    assert len(out) == 6 and len({c.ids for c in out}) == 6
    assert_same(out[:3], alone)


@pytest.mark.parametrize("draft", ["plain", "remembering"])
def test_a_prompt_is_prefilled_once_where_the_drafter_allows(draft):
    made = BoundDrafter(drafters.plain(), None)
    if draft == "remembering":
        made = planted.remembering(GAMMA, VOCAB, [(5,) * 60])
    engine = make_engine(draft=made, batch=2)
    calls = []
    prefill = engine._programs.prefill
    engine._programs = _Spy(engine._programs, calls, prefill)
    same = [Request(prompt_ids=(5, 6) * 20, seed=s, max_new_tokens=3) for s in range(5)]
    drain(engine, [*same, Request(prompt_ids=(6, 5) * 20, max_new_tokens=3)])
    chunks = 3  # 39 tokens in buckets of 16
    assert len(calls) == (2 if draft == "plain" else 6) * chunks


class _Spy:
    """Programs whose prefills are counted."""

    def __init__(self, programs, calls, prefill):
        self._programs, self._calls, self._prefill = programs, calls, prefill

    def prefill(self, *args, **kwargs):
        self._calls.append(kwargs["size"])
        return self._prefill(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._programs, name)


def test_nan_of_the_drafter_is_rejected():
    table = np.full((VOCAB, VOCAB), -np.log(VOCAB), np.float32)
    table[::2] = np.nan
    table[1::4] = -np.inf
    draft = planted.sampled(GAMMA, jnp.asarray(table))
    requests = [
        Request(prompt_ids=(i, 8 + i), max_new_tokens=16, temperature=t, seed=i)
        for i, t in enumerate((0.0, 1.0, 1.0))
    ]
    assert_same(run(requests, draft=draft), run(requests))
    for rule in ("rejection", "block"):
        for done in run(requests, draft=draft, rule=rule):
            assert done.finish_reason == "length" and len(done.ids) == 16
            assert np.all(np.isfinite(done.logprobs))


def test_ids_beyond_the_tokenizer_are_never_emitted():
    padded = dataclasses.replace(
        MODEL, tokenizer=tiny_model(0, vocab_size=16).tokenizer
    )
    request = Request(prompt_ids=(5, 6), max_new_tokens=40, temperature=3.0)
    (done,) = run([request], model=padded)
    assert max(done.ids) < 16 and len(set(done.ids)) > 8
    (free,) = run([request])
    assert max(free.ids) >= 16


@pytest.mark.parametrize(
    ("match", "settings"),
    [
        ("repetition_penalty=0", dict(repetition_penalty=0)),
        ("repetition_penalty=nan", dict(repetition_penalty=float("nan"))),
        ("presence_penalty=inf", dict(presence_penalty=float("inf"))),
        ("frequency_penalty=nan", dict(frequency_penalty=float("nan"))),
        (r"logit_bias\[3\]=inf", dict(logit_bias={3: float("inf")})),
        ("logit_bias id=-1", dict(logit_bias={-1: 1.0})),
        ("banned_ids=-2", dict(banned_ids=(-2,))),
        ("forced_ids position=-1", dict(forced_ids={-1: 2})),
        (r"forced_ids\[0\]=-3", dict(forced_ids={0: -3})),
        ("min_new_tokens=-1", dict(min_new_tokens=-1)),
    ],
)
def test_values_out_of_range_are_named(match, settings):
    with pytest.raises(ValueError, match=match):
        Controls(**settings)


@pytest.mark.parametrize(
    ("match", "settings"),
    [
        ("logit_bias holds id 256, outside", dict(logit_bias={256: 1.0})),
        ("banned_ids holds id 999", dict(banned_ids=(999,))),
        ("forced_ids holds id 256", dict(forced_ids={0: 256})),
        ("forced_ids has output position 9, beyond", dict(forced_ids={9: 1})),
        ("min_new_tokens=5 is more than", dict(min_new_tokens=5)),
        ("is over 9 ids", dict(token_mask=TokenMask.from_allowed((1,), 9))),
    ],
)
def test_controls_that_do_not_fit_the_model_are_refused(match, settings):
    with pytest.raises(ValueError, match=match):
        specjax.generate(
            MODEL, [[1, 2]], controls=Controls(**settings), max_new_tokens=4
        )


def test_controls_that_an_engine_does_not_carry_are_refused():
    engine = make_engine(batch=1, controls=ControlSpec(forced=True))
    request = Request(prompt_ids=(1, 2), controls=Controls(banned_ids=(3,)))
    with pytest.raises(ValueError, match=r"uses bias.*ControlSpec\(bias=True\)"):
        engine.submit(request)
    masked = Request(prompt_ids=(1, 2), controls=Controls(token_mask=MASK))
    with pytest.raises(ValueError, match=r"'random' is not among the 0 .*token_masks="):
        engine.submit(masked)
    with pytest.raises(ValueError, match="top_logprobs=3 is more than .*n_top=0"):
        engine.submit(Request(prompt_ids=(1, 2), top_logprobs=3))
