"""Checks of the whole decode loop on a table target, quick enough for every mutant.

Each check runs the programs that ``generate`` runs and returns what is wrong, or None.
They make their plans anew, so what they compile is the code as it is then, patched or
not.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import verify
from specjax.decode import (
    Completion,
    Controls,
    Engine,
    Request,
    programs,
    union_masks,
    union_spec,
)
from specjax.drafters import BoundDrafter, plain
from specjax.testing import planted
from specjax.testing.oracle import g_test
from specjax.testing.reference_controls import controlled_logits, sampling_law
from specjax.testing.table_target import sequence_law, table_model
from specjax.text import TokenMask
from specjax.weights import Model

_VOCAB, _GAMMA, _NEW, _BATCH, _CALLS = 5, 3, 3, 128, 100
_TEMPERATURE, _TOP_P = 0.8, 0.95
_STOP = 4


def make_model() -> Model:
    """Makes the table that the checks decode from."""
    rng = np.random.default_rng(4)
    # Flat: where a residual is one token, a wrong draw from it does not show.
    return table_model(1.2 * rng.normal(size=(_VOCAB,) * 3))


def sampled_draft(*, adversarial: bool = False) -> BoundDrafter:
    """Plants a drafter that draws from a table and says so.

    Args:
      adversarial: the table likes what the target does not, and excludes tokens.
    """
    rng = np.random.default_rng(5)
    table = rng.normal(size=(_VOCAB, _VOCAB))
    if adversarial:
        table = -3 * np.asarray(make_model().params["table"])[0]
        table[:, 2] = -np.inf
    return planted.sampled(_GAMMA, jax.nn.log_softmax(jnp.asarray(table)))


def check_law(
    model: Model,
    rule: verify.VerifyRule,
    draft: BoundDrafter | None = None,
    *,
    calls: int = _CALLS,
    least: float = 1e-5,
    temperature: float = _TEMPERATURE,
    top_p: float = _TOP_P,
) -> str | None:
    """Compares sequences drawn by the whole loop with the exact law.

    Every position, every pair of positions and whole sequences are compared.

    Args:
      model: from ``make_model``, or a mutant of it.
      rule: the rule.
      draft: the drafter; None is ``sampled_draft()``.
      calls: calls of the loop, each of which draws 128 sequences.
      least: p-value below which a difference is a fault.
      temperature: of the draws.
      top_p: of the draws.

    Returns:
      The fault, or None.
    """
    laws = sampling_law(
        np.asarray(model.params["table"]), temperature=temperature, top_p=top_p
    )
    law = sequence_law(laws, (0, 1, 2), _NEW)
    request = Request(
        prompt_ids=(0, 1, 2), max_new_tokens=_NEW, temperature=temperature, top_p=top_p
    )
    draws = _draw(model, draft or sampled_draft(), rule, calls, request)
    for axes in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]:
        counts = np.zeros([_VOCAB] * len(axes), np.int64)
        np.add.at(counts, tuple(draws[:, a] for a in axes), 1)
        others = tuple(a for a in range(_NEW) if a not in axes)
        expected = law.sum(axis=others)
        if np.any(counts[expected == 0]):
            return f"law at {axes}: drew what the filters exclude"
        p_value = g_test(counts.ravel(), expected.ravel())
        if p_value < least:
            return f"law at {axes}: p-value {p_value:.0e}"
    return None


def check_identity(model: Model) -> str | None:
    """Compares speculation on with off, under settings, and off with the reference."""
    requests = _requests()
    off = _complete(model, BoundDrafter(plain(), {}), requests)
    texts = [(*c.prompt_ids, *c.ids) for c in off]
    right = planted.right(_GAMMA, _VOCAB, texts[:8])
    hashed = planted.hashed(_GAMMA, _VOCAB, texts[:8])
    return (
        _against_reference(model, requests, off)
        or _compare(off, _complete(model, hashed, requests))
        or _compare(off, _complete(model, right, requests))
    )


def check_seeds(model: Model) -> str | None:
    """Looks at whether rows of other seeds are other draws, and of equal ones equal."""
    seeds = (7, 8, 9, 7)
    for rule in (verify.coupled, verify.rejection):
        requests = [
            Request(prompt_ids=(0, 1), max_new_tokens=24, temperature=1.5, seed=s)
            for s in seeds
        ]
        draft = planted.constant(_GAMMA, _VOCAB, (0, 1, 2))
        done = _complete(model, draft, requests, rule=rule)
        if len({c.ids for c in done}) != len(set(seeds)):
            return f"{rule.name}: seeds {seeds} gave {len({c.ids for c in done})} texts"
    return None


def check_errors(model: Model) -> str | None:
    """Looks at whether a NaN row ends with an error, and alone."""
    table = np.asarray(model.params["table"]).copy()
    requests = [Request(prompt_ids=(0, i), max_new_tokens=8, seed=i) for i in range(3)]
    sound = _complete(model, BoundDrafter(plain(), {}), requests)
    table[0, 1] = np.nan
    spoilt = dataclasses.replace(model, params={"table": jnp.asarray(table)})
    done = _complete(spoilt, BoundDrafter(plain(), {}), requests)
    if done[1].ids or "not finite" not in (done[1].error or ""):
        return f"a row of NaN logits: {done[1].ids}, {done[1].error}"
    for i in (0, 2):
        pairs = set(zip((0, i, *sound[i].ids), (i, *sound[i].ids), strict=False))
        if (0, 1) not in pairs and done[i].ids != sound[i].ids:
            return "another row's NaN changed a row"
    return None


#: The checks by name; those of the law run every rule that takes uniforms.
CHECKS: dict[str, Callable[[Model], str | None]] = {
    "identity": check_identity,
    "law of rejection": lambda model: check_law(model, verify.rejection),
    "law of block": lambda model: check_law(model, verify.block),
    "seeds": check_seeds,
    "errors": check_errors,
}


def _requests() -> list[Request]:
    """Rows that between them use everything that moves with the draft."""
    mask = np.asarray([[0, 1, -1, 2, -1], [1, 2, 0, -1, -1], [-1, 2, 1, 0, 2]])
    controls = [
        Controls(),
        Controls(frequency_penalty=0.7, presence_penalty=0.5, repetition_penalty=1.4),
        Controls(min_new_tokens=7, logit_bias={_STOP: 2.0}),
        Controls(forced_ids={3: 0, 5: 2}, banned_ids=(1,)),
        Controls(token_mask=TokenMask(mask.astype(np.int32), 0)),
    ]
    # One mask for all rows: masks are told apart by identity.
    return [
        Request(
            prompt_ids=tuple((i + j) % (_VOCAB - 1) for j in range(2 + i)),
            max_new_tokens=9 + 2 * i,
            temperature=temperature,
            top_p=1.0 if i % 2 else 0.9,
            seed=10 * i,
            stop_ids=(_STOP,) if i in (0, 2, 3) else (),
            controls=own,
        )
        for temperature in (0.0, 0.9)
        for i, own in enumerate(controls)
    ]


def _complete(
    model: Model,
    draft: BoundDrafter,
    requests: Sequence[Request],
    *,
    rule: verify.VerifyRule = verify.coupled,
) -> list[Completion]:
    own = [r.controls for r in requests]
    engine = Engine(
        model,
        drafter=draft.drafter,
        rule=rule,
        batch_size=4,
        capacity=48,
        exact=True,
        width=_GAMMA + 1,
        draft_params=draft.params,
        controls=union_spec(own),
        token_masks=union_masks(own),
    )
    numbered = [dataclasses.replace(r, id=i) for i, r in enumerate(requests)]
    done = {e.id: e.completion for e in engine.run(numbered) if e.completion}
    return [done[i] for i in range(len(requests))]


def _compare(off: Sequence[Completion], on: Sequence[Completion]) -> str | None:
    for i, (a, b) in enumerate(zip(off, on, strict=True)):
        if a.ids != b.ids or a.finish_reason != b.finish_reason:
            return f"request {i}: {b.ids} ({b.finish_reason}) on, {a.ids} off"
        if not np.allclose(a.logprobs, b.logprobs, atol=1e-4):
            return f"request {i}: other log-probabilities on than off"
        if b.stats.committed != len(b.ids):
            return f"request {i}: {b.stats.committed} counted, {len(b.ids)} delivered"
    return None


def _against_reference(
    model: Model, requests: Sequence[Request], done: Sequence[Completion]
) -> str | None:
    table = np.asarray(model.params["table"], np.float64)
    for i, (request, completion) in enumerate(zip(requests, done, strict=True)):
        ids = (*request.prompt_ids, *completion.ids)
        n = len(request.prompt_ids)
        if len(completion.ids) > request.max_new_tokens:
            return f"request {i}: more than max_new_tokens"
        for at, token in enumerate(completion.ids):
            logits = table[ids[n + at - 2], ids[n + at - 1]]
            own = logits[token] - np.log(np.sum(np.exp(logits)))
            if abs(own - completion.logprobs[at]) > 1e-4:
                return f"request {i}: log-probability {at} is not the target's"
            allowed = controlled_logits(
                logits,
                request.controls,
                prompt_ids=request.prompt_ids,
                output_ids=completion.ids[:at],
                stop_ids=request.stop_ids,
            )
            short = request.temperature == 0 and allowed[token] < allowed.max() - 1e-4
            if allowed[token] == -np.inf or short:
                return f"request {i}: token {at} is not plain decoding's"
    return None


def _draw(
    model: Model,
    draft: BoundDrafter,
    rule: verify.VerifyRule,
    calls: int,
    request: Request,
) -> np.ndarray:
    """Draws sequences of ``_NEW`` tokens, [_BATCH * calls, _NEW]."""
    engine = Engine(
        model,
        drafter=draft.drafter,
        rule=rule,
        batch_size=_BATCH,
        capacity=32,
        draft_params=draft.params,
    )
    for row in range(_BATCH):
        engine.submit(dataclasses.replace(request, id=row))
    engine.admit()
    # The slots just after the prompt: reused with other seeds, for speed.
    ready = jax.device_get(engine.state)
    run = programs(engine.plan, _NEW).run
    start = np.full((_BATCH,), 3, np.int32)
    out = []
    for call in range(calls):
        seeds = np.arange(_BATCH, dtype=np.uint32) + np.uint32(1 + _BATCH * call)
        state = ready.replace(settings=ready.settings._replace(seed=seeds))
        state, _ = run(model.params, draft.params, state, start, np.int32(_NEW))
        out.append(np.asarray(state.tokens)[:, 3 : 3 + _NEW])
    return np.concatenate(out)
