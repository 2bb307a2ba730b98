"""Predictions and advice for a target, a drafter and devices."""

import dataclasses

import numpy as np
import pytest

from specjax.theory import (
    Deployment,
    ModelShape,
    advise,
    advise_deployment,
    expected_tokens_per_pass,
    gaining_batches,
    gaining_contexts,
    get_hardware,
    losing_batch,
    predict_cost_ratio,
    predict_speedup,
    predict_verify_cost,
)

H100 = get_hardware("h100-sxm")
LLAMA = dict(
    n_layers=32,
    d_model=4096,
    n_heads=32,
    n_kv_heads=8,
    head_width=128,
    d_ff=14336,
    vocab_size=128256,
)
LLAMA_8B = ModelShape.decoder(**LLAMA)
SMALL = ModelShape.decoder(
    n_layers=16,
    d_model=2048,
    n_heads=32,
    n_kv_heads=8,
    head_width=64,
    d_ff=8192,
    vocab_size=128256,
)


def test_verify_cost_goes_from_one_to_the_width():
    deployment = Deployment(target=LLAMA_8B, hardware=H100)
    v = predict_verify_cost(deployment, 5, batch=[1, 16, 64, 256, 4096])
    assert v[0] == pytest.approx(1, abs=0.01)
    assert v[-1] == pytest.approx(5, rel=0.02)
    assert np.all(np.diff(v) > 0)
    assert predict_verify_cost(deployment, 1, batch=7, n_context=9) == 1
    # In a long context a pass is mostly its cache, which all rows of a text share.
    long = predict_verify_cost(deployment, 5, batch=256, n_context=[0, 8000, 64000])
    assert np.all(np.diff(long) < 0)


def test_cost_ratio():
    free = Deployment(target=LLAMA_8B, hardware=H100)
    assert predict_cost_ratio(free, batch=[1, 2]).tolist() == [0, 0]
    drafted = dataclasses.replace(free, draft=SMALL)
    assert predict_cost_ratio(drafted) == pytest.approx(
        SMALL.weight_bytes / LLAMA_8B.weight_bytes, rel=0.01
    )
    whole = dataclasses.replace(free, draft=LLAMA_8B)
    assert predict_cost_ratio(whole, n_context=30000) == 1
    bounded = dataclasses.replace(whole, draft_context=512)
    c = predict_cost_ratio(bounded, batch=64, n_context=[512, 4000, 32000])
    assert c[0] == 1
    assert 1 > c[1] > c[2]


def test_speedup_is_the_formula():
    deployment = Deployment(target=LLAMA_8B, hardware=H100, draft=SMALL)
    at = {"batch": 32, "n_context": 2000}
    c = predict_cost_ratio(deployment, **at)
    v = predict_verify_cost(deployment, 5, **at)
    expected = expected_tokens_per_pass(0.8, 4) / (4 * c + v)
    assert predict_speedup(deployment, 0.8, 4, **at) == pytest.approx(expected)
    assert predict_speedup(deployment, [0.8] * 4, 4, **at) == pytest.approx(expected)
    assert predict_speedup(deployment, 0.8, 0, **at) == 1


def test_above_some_batch_speculation_loses():
    deployment = Deployment(target=LLAMA_8B, hardware=H100, draft=SMALL)
    limit = losing_batch(deployment, 0.7, 5, n_context=200)
    assert limit is not None
    assert gaining_batches(deployment, 0.7, 5, n_context=200) == (1, limit - 1)
    gains = predict_speedup(
        deployment, 0.7, 5, batch=[limit - 1, limit, 4096], n_context=200
    )
    assert gains[0] > 1 >= gains[1] > gains[2]
    # A pass has free rows up to the ridge; well beyond them it loses.
    assert 295 / 6 < limit < 295
    better = losing_batch(deployment, 0.9, 5, n_context=200)
    assert better is not None
    assert better > limit
    assert losing_batch(deployment, 0.7, 5, n_context=200, max_batch=8) is None


def test_long_contexts_gain_with_the_batch_if_the_draft_cache_is_bounded():
    """MagicDec's finding: with a bounded cache the gain grows with the batch."""
    deployment = Deployment(
        target=LLAMA_8B, hardware=H100, draft=LLAMA_8B, draft_context=512
    )
    gains = predict_speedup(
        deployment, 0.9, 4, batch=[1, 8, 32, 128, 256], n_context=32000
    )
    assert np.all(np.diff(gains) > 0)
    assert gains[0] < 1 < 2.5 < gains[-1]
    assert losing_batch(deployment, 0.9, 4, n_context=32000) is None
    assert gaining_batches(deployment, 0.9, 4, n_context=32000) == (2, 4096)
    assert losing_batch(deployment, 0.9, 4, n_context=0) == 1
    contexts = gaining_contexts(deployment, 0.9, 4, batch=64)
    assert contexts is not None
    first, last = contexts
    assert 0 < first < 4000
    assert last == 131072
    assert gaining_contexts(deployment, 0.9, 4, batch=64, max_context=100) is None


def test_advice_names_what_to_change():
    lower = advise(0.7, 6, 0.1)
    assert lower.best.gamma == 4
    assert lower.lines[0].startswith("Lower gamma from 6 to 4: 1.98 instead of 1.91")
    assert lower.ceiling == pytest.approx(1 / (0.3 + 0.07))
    assert lower.break_even == pytest.approx(0.1)
    assert advise(0.8, 2, 0.05).lines[0].startswith("Raise gamma from 2 to 8")
    assert advise(0.8, 8, 0.05).lines[0].startswith("Keep gamma 8: it is the best")
    assert advise(0.8, 10, 0.05).lines[0].startswith("Keep gamma 10: it gives 3.05")
    off = advise(0.1, 4, 0.3)
    assert off.best.gamma == 0
    assert off.lines[0].startswith("Switch speculation off: no gamma gains")
    assert "above an acceptance rate of 0.30" in off.lines[0]
    assert "slower than plain" in advise(0.5, 10, 0.2).lines[0]
    assert "even if always accepted" in advise(0.9, 1, 1.5).lines[0]
    by_position = advise([0.9, 0.2, 0.1], 3, 0.1, [1.0, 1.0, 1.1, 1.2])
    assert by_position.best.gamma == 1
    assert by_position.ceiling > by_position.best.speedup


def test_advice_on_drafters():
    assert "a cheaper drafter" in advise(0.95, 4, 0.9).lines[1]
    assert "a more accurate drafter" in advise(0.5, 2, 0.01).lines[1]
    assert "costs nothing" in advise(0.5, 2, 0.0, 1.1).lines[1]


def test_advice_on_batch_and_context():
    deployment = Deployment(target=LLAMA_8B, hardware=H100, draft=SMALL)
    limit = losing_batch(deployment, 0.7, 5, n_context=200)
    assert limit is not None
    small = advise_deployment(deployment, 0.7, 5, batch=1, n_context=200)
    assert small.speedup == pytest.approx(
        predict_speedup(deployment, 0.7, 5, n_context=200)
    )
    assert f"off above batch {limit - 1}," in small.lines[2]
    assert "loses" not in small.lines[2]
    large = advise_deployment(deployment, 0.7, 5, batch=400, n_context=200)
    assert any("Batch 400 loses." in line for line in large.lines)
    assert "tokens gain" in large.lines[-1]
    free = Deployment(target=LLAMA_8B, hardware=H100)
    calm = advise_deployment(free, [0.7] * 5, 5, n_context=1000, max_batch=64)
    assert any("Every batch up to 64 gains" in line for line in calm.lines)
    own = dataclasses.replace(free, draft=LLAMA_8B, draft_context=64)
    low = advise_deployment(own, 0.9, 4, n_context=32000)
    assert any("off below batch 2," in line for line in low.lines)


def test_bad_input_is_named():
    deployment = Deployment(target=LLAMA_8B, hardware=H100)
    for find in (losing_batch, gaining_batches, gaining_contexts):
        with pytest.raises(ValueError, match="gamma=0"):
            find(deployment, 0.5, 0)
    with pytest.raises(ValueError, match="acceptance=2"):
        predict_speedup(deployment, 2.0, 3)
    with pytest.raises(ValueError, match="gamma=nan"):
        advise_deployment(deployment, 0.5, float("nan"))  # pyright: ignore
