"""Rooflines of a pass, by hand and against published numbers."""

import dataclasses

import numpy as np
import pytest

from specjax.theory import (
    Deployment,
    ModelShape,
    get_hardware,
    pass_time,
    passes_per_second_ceiling,
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
