"""Runs requests through an engine; tests share plans, so that little compiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import verify
from specjax.decode import Engine, Request
from specjax.drafters import BoundDrafter, plain
from specjax.sampling import Settings, gumbel_noise, warp
from specjax.testing import tiny_model

#: One block of the cache and of attention.
CAPACITY = 240
GAMMA, VOCAB = 4, 256

MODEL = tiny_model()
PLAIN = BoundDrafter(plain(), None)


def run(
    requests,
    *,
    model=MODEL,
    draft=PLAIN,
    rule="coupled",
    exact=True,
    width=None,
    batch=3,
    capacity=CAPACITY,
    passes=16,
    **options,
):
    """Decodes requests; returns their completions in order."""
    engine = make_engine(
        model=model,
        draft=draft,
        rule=rule,
        exact=exact,
        width=width,
        batch=batch,
        capacity=capacity,
        passes=passes,
        **options,
    )
    return drain(engine, requests)


def make_engine(
    *,
    model=MODEL,
    draft=PLAIN,
    rule="coupled",
    exact=True,
    width=None,
    batch=3,
    capacity=CAPACITY,
    passes=16,
    **options,
):
    if exact and width is None:
        width = GAMMA + 1
    return Engine(
        model,
        drafter=draft.drafter,
        rule=verify.by_name(rule),
        batch_size=batch,
        capacity=capacity,
        exact=exact,
        width=width,
        draft_params=draft.params,
        passes_per_call=passes,
        **options,
    )


def drain(engine, requests):
    requests = [dataclasses.replace(r, id=i) for i, r in enumerate(requests)]
    done = {}
    for event in engine.run(requests):
        if event.completion is not None:
            done[event.id] = event.completion
    return [done[i] for i in range(len(requests))]


def assert_same(got, wanted):
    """The same completions, bit for bit; only the work differs."""
    for a, b in zip(got, wanted, strict=True):
        assert a.ids == b.ids
        assert a.logprobs == b.logprobs
        assert (a.text, a.finish_reason, a.error) == (b.text, b.finish_reason, b.error)


def texts_of(completions):
    """What a planted drafter must know to be right about these."""
    return [(*c.prompt_ids, *c.ids) for c in completions]


def logits_of(model, ids):
    """Raw logits that follow each prefix of a text, from one pass. [T, V]"""
    padded = np.zeros((1, 256 * -(-len(ids) // 256)), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(_forward(model, padded))[: len(ids)]


_FORWARDS = {}


def _forward(model, tokens):
    target = model.target
    if target not in _FORWARDS:
        _FORWARDS[target] = jax.jit(
            lambda params, tokens, cache: target.forward(params, tokens, cache)[0][0]
        )
    cache = target.init_cache(1, tokens.shape[1])
    return _FORWARDS[target](model.params, tokens, cache)


def margin(model, request, ids, position):
    """How far the best two ids were apart where ``ids[position]`` was chosen."""
    logits = logits_of(model, (*request.prompt_ids, *ids[:position]))[-1]
    settings = Settings.full(
        1,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=request.seed,
    )
    scores = jnp.asarray(logits)[None, None]
    if request.temperature > 0:
        at = jnp.full((1, 1), len(request.prompt_ids) + position, jnp.int32)
        noise = gumbel_noise(settings.seed, at, logits.shape[-1])
        scores = warp(scores, settings) + noise
    best = np.sort(np.asarray(scores)[0, 0])
    return best[-1] - best[-2]


def mixed_requests(*, sampled=True, new=24):
    """Rows that differ in everything a row may differ in."""
    rng = np.random.default_rng(5)
    prompts = [
        rng.integers(0, VOCAB, 3),
        np.tile(rng.integers(0, VOCAB, 5), 6),
        rng.integers(0, VOCAB, 1),
        rng.integers(0, VOCAB, 70),
        np.tile(rng.integers(0, VOCAB, 2), 9),
        rng.integers(0, 12, 40),
    ]
    settings = [
        dict(temperature=0.0, seed=1),
        dict(temperature=0.7, seed=2, top_p=0.9),
        dict(temperature=1.0, seed=2**32 - 1, top_k=20),
        dict(temperature=0.0, seed=3),
        dict(temperature=1.0, seed=4, min_p=0.05, top_p=0.9, top_k=20),
        dict(temperature=0.7, seed=5),
    ]
    if not sampled:
        settings = [dict(temperature=0.0, seed=s["seed"]) for s in settings]
    return [
        Request(
            prompt_ids=tuple(int(i) for i in prompt),
            # Greedy rows are long enough to run into a cycle, which lookup finds.
            max_new_tokens=(new if setting["temperature"] else 3 * new) + i,
            **setting,
        )
        for i, (prompt, setting) in enumerate(zip(prompts, settings, strict=True))
    ]
