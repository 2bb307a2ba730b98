"""Tiny models of every family and rotary embedding against transformers' logits."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import RopeConfig, decoder_target
from specjax.weights import load_hf

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "models"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/golden.npz"))
# One worker a case, so that its three tests share compiled programs.
EACH = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CASES]
ATOL = 1e-4
BLOCK, PREFILL, BATCH = 3, 11, 2


@functools.cache
def _load(name):
    model = load_hf(GOLDEN / name, with_tokenizer=False)
    with np.load(GOLDEN / name / "golden.npz") as golden:
        return model, golden["tokens"], golden["logits"]


@functools.cache
def _forward(config):
    # One jitted function a configuration: all tests of a case share its programs.
    # Without optimisation they compile in half the time.
    options = {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    }
    forward = jax.jit(decoder_target(config).forward, compiler_options=options)

    def highest(*args):
        with jax.default_matmul_precision("highest"):
            return forward(*args)

    return highest


def _whole(config, params, tokens):
    cache = decoder_target(config).init_cache(BATCH, len(tokens) + BLOCK)
    tokens = jnp.broadcast_to(jnp.asarray(tokens), (BATCH, len(tokens)))
    return np.asarray(_forward(config)(params, tokens, cache)[0])


def test_all_cases_are_there():
    assert len(CASES) == 13


@pytest.mark.parametrize("name", EACH)
def test_one_forward(name):
    model, tokens, logits = _load(name)
    out = _whole(model.config, model.params, tokens)
    np.testing.assert_allclose(out[0], logits, rtol=0, atol=ATOL)
    np.testing.assert_array_equal(out[0], out[1])


@pytest.mark.parametrize("name", EACH)
def test_token_by_token(name):
    model, tokens, logits = _load(name)
    target, forward = model.target, _forward(model.config)
    cache = target.init_cache(BATCH, len(tokens) + BLOCK)
    one = jnp.ones((BATCH,), jnp.int32)
    for position, token in enumerate(tokens):
        block = jnp.full((BATCH, 1), token, jnp.int32)
        out, _, cache = forward(model.params, block, cache)
        cache = target.commit(cache, one)
        np.testing.assert_allclose(out[0, 0], logits[position], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", EACH)
def test_prefill_then_blocks_with_partial_commits(name):
    """Rows commit different counts; what is not committed was a wrong token."""
    model, tokens, logits = _load(name)
    target, forward = model.target, _forward(model.config)
    rng = np.random.default_rng(len(name))
    cache = target.init_cache(BATCH, len(tokens) + BLOCK)
    # A prefill bucket: the prompt, then padding that is never committed.
    prompt = np.where(np.arange(len(tokens)) < PREFILL, tokens, 0)
    out, _, cache = forward(
        model.params, jnp.broadcast_to(prompt, (BATCH, len(tokens))), cache
    )
    np.testing.assert_allclose(out[0, :PREFILL], logits[:PREFILL], rtol=0, atol=ATOL)
    cache = target.commit(cache, jnp.full((BATCH,), PREFILL, jnp.int32))
    length = np.full(BATCH, PREFILL)
    while (length < len(tokens)).any():
        n = np.minimum(rng.integers(1, BLOCK + 1, BATCH), len(tokens) - length)
        block = rng.integers(0, model.config.vocab_size, (BATCH, BLOCK))
        for row in range(BATCH):
            block[row, : n[row]] = tokens[length[row] : length[row] + n[row]]
        out, _, cache = forward(model.params, jnp.asarray(block, jnp.int32), cache)
        for row in range(BATCH):
            want = logits[length[row] : length[row] + n[row]]
            np.testing.assert_allclose(out[row, : n[row]], want, rtol=0, atol=ATOL)
        cache = target.commit(cache, jnp.asarray(n, jnp.int32))
        length += n


def _plain_rope(config):
    return dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))


def _rope(**changes):
    return lambda config: dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, **changes)
    )


def _wider(config):
    windows = tuple(w and w + 1 for w in config.windows)
    return dataclasses.replace(config, windows=windows)


MUTANTS = {
    "no window": ("mistral_window", lambda c: dataclasses.replace(c, windows=())),
    "window off by one": ("mistral_window", _wider),
    "window on all layers": (
        "qwen2_window",
        lambda c: dataclasses.replace(c, windows=(6, 6, 6)),
    ),
    "wrong theta": ("smollm2", _rope(theta=10000.0)),
    "linear ignored": ("llama_linear", _plain_rope),
    "dynamic ignored": ("llama_dynamic", _plain_rope),
    "dynamic starts late": ("llama_dynamic", _rope(original_context=13)),
    "llama3 ignored": ("llama_llama3", _plain_rope),
    "llama3 taken for linear": ("llama_llama3", _rope(kind="linear")),
    "yarn ignored": ("llama_yarn", _plain_rope),
    "yarn without its factor": ("llama_yarn", _rope(attention_factor=1.0)),
    "yarn rounded": ("llama_yarn_mscale", _rope(truncate=True)),
    "yarn without mscale": ("llama_yarn_mscale", _rope(mscale=None)),
    "longrope ignored": ("llama_longrope", _plain_rope),
    "longrope switches late": ("llama_longrope", _rope(original_context=13)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_has_teeth(mutant):
    name, change = MUTANTS[mutant]
    model, tokens, logits = _load(name)
    out = _whole(change(model.config), model.params, tokens)
    assert np.abs(out[0] - logits).max() > 30 * ATOL
