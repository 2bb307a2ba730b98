"""The hardware table and measuring one's own."""

import dataclasses
import math
from typing import Any

import pytest

from specjax.theory import (
    HARDWARE,
    Hardware,
    free_rows,
    get_hardware,
    measure_hardware,
    ridge_point,
)

RIDGES = {
    "h100-sxm": 295,
    "h200-sxm": 206,
    "tpu-v5e": 241,
    "tpu-v5p": 166,
    "tpu-v6e": 560,
    "tpu7x": 313,
}


@pytest.mark.parametrize("name", list(RIDGES))
def test_ridge_points(name):
    device = get_hardware(name)
    assert ridge_point(device) == pytest.approx(RIDGES[name], abs=0.5)
    # Rows that products with bfloat16 weights take for free, and with 8-bit weights.
    assert free_rows(device, 2) == pytest.approx(RIDGES[name], abs=0.5)
    assert free_rows(device, 1) == pytest.approx(RIDGES[name] / 2, abs=0.3)


def test_the_b200_ridge_lies_in_its_quoted_range():
    assert ridge_point(get_hardware("b200")) == pytest.approx(290, abs=10)


@pytest.mark.parametrize(
    ("name", "size", "milliseconds"),
    [
        ("h100-sxm", 16e9, 4.8),
        ("h200-sxm", 16e9, 3.3),
        ("tpu-v5e", 8e9, 9.8),
        ("tpu-v6e", 16e9, 9.8),
        ("gb10", 16e9, 59),
        ("gb10", 14e9, 51),
    ],
)
def test_decode_floors(name, size, milliseconds):
    floor_s = size / get_hardware(name).bandwidth_bytes_per_s
    assert 1e3 * floor_s == pytest.approx(milliseconds, rel=0.015)


@pytest.mark.parametrize("device", HARDWARE.values(), ids=list(HARDWARE))
def test_every_entry_says_where_it_is_from(device):
    assert device.source
    assert device.memory_bytes > 1e9
    assert 1e11 < device.bandwidth_bytes_per_s < 1e13
    rates = {
        field.name: getattr(device, field.name)
        for field in dataclasses.fields(device)
        if field.name.endswith("flops_per_s")
    }
    assert any(rates.values())
    # A narrower format is never slower.
    order = ("fp32", "bf16", "fp8", "fp4")
    known = [rates[f"{rate}_flops_per_s"] for rate in order]
    known = [rate for rate in known if rate]
    assert known == sorted(known)
    measured = device.measured_bandwidth_bytes_per_s
    assert measured is None or measured < device.bandwidth_bytes_per_s
    hash(device)


def test_names_are_found_in_any_case():
    assert get_hardware("H100_SXM") is HARDWARE["h100-sxm"]
    assert get_hardware("TPU v5e") is HARDWARE["tpu-v5e"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'h900' is unknown; known are .*h100-sxm.*"):
        get_hardware("h900")


def test_an_unknown_rate_is_not_guessed():
    with pytest.raises(ValueError, match="bf16 rate of gb10 is not known.*replace"):
        ridge_point(get_hardware("gb10"))
    own = dataclasses.replace(get_hardware("gb10"), bf16_flops_per_s=1e14)
    assert ridge_point(own) == pytest.approx(1e14 / 273e9)
    with pytest.raises(ValueError, match="rate='int4' is unknown"):
        own.flops_per_s("int4")  # pyright: ignore


def test_measured_rates_can_take_the_place_of_peaks():
    device = get_hardware("h200-sxm").as_measured()
    assert device.bandwidth_bytes_per_s == 4.3e12
    assert device.flops_per_s() == 788e12
    assert get_hardware("a100-80gb").as_measured() == get_hardware("a100-80gb")


OWN: dict[str, Any] = dict(
    name="mine",
    memory_bytes=1e9,
    bandwidth_bytes_per_s=1e10,
    source="a guess",
    certainty="recalled",
)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(bandwidth_bytes_per_s=0), "bandwidth_bytes_per_s=0.*measure it"),
        (dict(bandwidth_bytes_per_s=math.nan), "bandwidth_bytes_per_s=nan"),
        (dict(memory_bytes=-1), "memory_bytes=-1"),
        (dict(bf16_flops_per_s=-1), "bf16_flops_per_s=-1"),
        (dict(link_latency_s=-1), "link_latency_s=-1"),
        (dict(certainty="sure"), "certainty='sure'"),
        (dict(source=""), "must not be empty"),
    ],
)
def test_bad_devices_are_named(change, match):
    Hardware(**OWN)
    with pytest.raises(ValueError, match=match):
        Hardware(**{**OWN, **change})
    with pytest.raises(ValueError, match="weight_bytes_per_param=0"):
        free_rows(get_hardware("h100-sxm"), 0)


def test_measuring_this_machine():
    """Tiny sizes: that it runs and counts right, not how fast the machine is."""
    device = measure_hardware(copy_bytes=2**20, matmul_size=128, repeats=2)
    assert device.certainty == "measured"
    assert device.name
    assert 1e6 < device.bandwidth_bytes_per_s < 1e14
    assert 1e6 < device.flops_per_s("bf16") < 1e16
    assert 1e6 < device.flops_per_s("fp32") < 1e16
    assert "1048576 bytes" in device.source
    assert ridge_point(device) > 0
    with pytest.raises(ValueError, match="copy_bytes=0"):
        measure_hardware(copy_bytes=0)
    with pytest.raises(ValueError, match="'int3' is not among"):
        measure_hardware(dtypes=("int3",))
