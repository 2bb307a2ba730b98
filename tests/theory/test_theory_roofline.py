"""Rooflines of a pass, predictions and advice."""

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
    pass_time,
    passes_per_second_ceiling,
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


def test_four_sparks_read_18_gigabytes_sixty_times_a_second():
    bandwidth = 4 * get_hardware("gb10").bandwidth_bytes_per_s
    assert bandwidth == 1092e9
    assert passes_per_second_ceiling(18e9, bandwidth) == pytest.approx(60, abs=1)


def test_seventy_billion_parameters_on_an_h100():
    model = ModelShape(n_params=70e9, weight_bytes=140e9)
    time = pass_time(model, H100)
    assert time.weights_s == pytest.approx(42e-3, abs=0.5e-3)
    assert time.arithmetic_s == pytest.approx(0.14e-3, abs=0.005e-3)
    assert time.total_s == time.weights_s


def test_counts_of_llama_8b():
    # 8.03e9 parameters, of which the embedding table is only looked up.
    assert LLAMA_8B.n_params == pytest.approx(8.03e9 - 128256 * 4096, rel=1e-3)
    assert LLAMA_8B.weight_bytes == 2 * LLAMA_8B.n_params
    assert LLAMA_8B.kv_bytes_per_token == 128 * 1024
    assert LLAMA_8B.attention_flops == 4 * 32 * 4096
    assert LLAMA_8B.n_reductions == 64
    quarter = ModelShape.decoder(**LLAMA, bytes_per_param=0.5, kv_bytes_per_element=1)
    assert quarter.weight_bytes == LLAMA_8B.weight_bytes / 4
    assert quarter.kv_bytes_per_token == LLAMA_8B.kv_bytes_per_token / 2


def test_parts_of_a_pass_by_hand():
    time = pass_time(LLAMA_8B, H100, width=5, batch=3, n_context=1000)
    rows = 15
    bandwidth, rate = 3.35e12, 989.5e12
    assert time.kv_s == pytest.approx(3 * 1005 * 131072 / bandwidth)
    assert time.activations_s == pytest.approx(
        rows * LLAMA_8B.activation_bytes_per_row / bandwidth
    )
    # Row i of 5 attends the cache, the rows before it and itself.
    positions = 3 * sum(1000 + i for i in range(1, 6))
    flops = 2 * LLAMA_8B.n_params * rows + LLAMA_8B.attention_flops * positions
    assert time.arithmetic_s == pytest.approx(flops / rate)
    assert time.link_s == 0
    assert time.total_s == pytest.approx(
        time.weights_s + time.activations_s + time.kv_s
    )


def test_a_wide_batch_is_bound_by_arithmetic():
    time = pass_time(LLAMA_8B, H100, batch=4096)
    assert time.arithmetic_s > time.weights_s + time.activations_s
    assert time.total_s == pytest.approx(time.arithmetic_s + time.kv_s, rel=1e-3)


def test_tensor_parallelism_divides_and_adds_the_link():
    linked = dataclasses.replace(H100, link_latency_s=1e-6)
    one = pass_time(LLAMA_8B, H100, batch=2, n_context=100)
    four = pass_time(LLAMA_8B, linked, batch=2, n_context=100, n_devices=4)
    assert four.weights_s == pytest.approx(one.weights_s / 4)
    assert four.kv_s == pytest.approx(one.kv_s / 4)
    # Each device sends 2 * 3/4 of 2 rows of 64 reductions of 4096 elements.
    sent = 1.5 * 2 * 64 * 4096 * 2
    assert four.link_s == pytest.approx(sent / 450e9 + 64e-6)
    assert four.total_s == pytest.approx(
        four.weights_s + four.activations_s + four.kv_s + four.link_s
    )


def test_two_sparks_pay_for_their_link():
    sparks = dataclasses.replace(get_hardware("gb10"), bf16_flops_per_s=1e14)
    time = pass_time(LLAMA_8B, sparks, n_devices=2)
    assert time.weights_s == pytest.approx(LLAMA_8B.weight_bytes / (2 * 273e9))
    assert time.link_s == pytest.approx(64 * 4096 * 2 / 25e9)


def test_shapes_broadcast():
    time = pass_time(LLAMA_8B, H100, width=[[1], [5]], batch=[1, 8, 64])
    assert all(np.shape(part) == (2, 3) for part in time)
    assert isinstance(pass_time(LLAMA_8B, H100).total_s, float)


def test_experts_are_read_as_rows_choose_them():
    model = ModelShape(
        n_params=3e9,
        weight_bytes=2e9,
        expert_weight_bytes=56e9,
        n_experts=128,
        n_experts_per_token=8,
    )
    assert model.read_weight_bytes(1) == pytest.approx(2e9 + 56e9 / 16)
    assert model.read_weight_bytes(10**6) == pytest.approx(58e9)
    rng = np.random.default_rng(0)
    chosen = [
        len({e for _ in range(6) for e in rng.choice(128, 8, replace=False)})
        for _ in range(2000)
    ]
    expected = 2e9 + 56e9 * np.mean(chosen) / 128
    assert model.read_weight_bytes(6) == pytest.approx(expected, rel=5e-3)
    # Wider passes read more experts: verifying is not free even at batch 1.
    dense = ModelShape(n_params=3e9, weight_bytes=6e9)
    costs = [
        predict_verify_cost(Deployment(target=m, hardware=H100), 6)
        for m in (model, dense)
    ]
    assert costs[0] > 3 > 1.1 > costs[1]


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


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(width=0), "width=0"),
        (dict(batch=0.5), "batch=0.5"),
        (dict(n_context=-1), "n_context=-1"),
        (dict(n_devices=0), "n_devices=0"),
        (dict(rate="fp4"), "fp4 rate of h100-sxm is not known"),
    ],
)
def test_bad_passes_are_named(change, match):
    with pytest.raises(ValueError, match=match):
        pass_time(LLAMA_8B, H100, **change)


def test_other_bad_input_is_named():
    alone = dataclasses.replace(H100, link_bytes_per_s=None)
    with pytest.raises(ValueError, match="link of h100-sxm is not known"):
        pass_time(LLAMA_8B, alone, n_devices=2)
    with pytest.raises(ValueError, match="read_bytes=0"):
        passes_per_second_ceiling(0, 1e12)
    with pytest.raises(ValueError, match="nothing to read"):
        ModelShape(n_params=1, weight_bytes=0)
    with pytest.raises(ValueError, match="n_params=nan"):
        ModelShape(n_params=float("nan"), weight_bytes=1)
    with pytest.raises(ValueError, match="n_experts_per_token"):
        ModelShape(n_params=1, weight_bytes=1, expert_weight_bytes=1)
    with pytest.raises(ValueError, match="n_layers=0"):
        ModelShape.decoder(**{**LLAMA, "n_layers": 0})
    deployment = Deployment(target=LLAMA_8B, hardware=H100)
    for find in (losing_batch, gaining_batches, gaining_contexts):
        with pytest.raises(ValueError, match="gamma=0"):
            find(deployment, 0.5, 0)
    with pytest.raises(ValueError, match="acceptance=2"):
        predict_speedup(deployment, 2.0, 3)
    with pytest.raises(ValueError, match="gamma=nan"):
        advise_deployment(deployment, 0.5, float("nan"))  # pyright: ignore
