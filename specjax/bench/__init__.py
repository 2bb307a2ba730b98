"""Measuring: whether text changed, and how fast it came."""

from specjax.bench._equivalence import Comparison, Difference, compare, score_margin
from specjax.bench._invariance import Flips, count_flips
from specjax.bench._micro import (
    Case,
    bare_pass,
    bare_prefill,
    capacity_cases,
    engine_pass,
    first_token_case,
    interleave,
    overhead_cases,
    settings_cases,
)
from specjax.bench._peer import Peer
from specjax.bench._speed import Measurement, measure, median_ratio
from specjax.bench._workloads import WORKLOADS, read_workloads

__all__ = [
    "WORKLOADS",
    "Case",
    "Comparison",
    "Difference",
    "Flips",
    "Measurement",
    "Peer",
    "bare_pass",
    "bare_prefill",
    "capacity_cases",
    "compare",
    "count_flips",
    "engine_pass",
    "first_token_case",
    "interleave",
    "measure",
    "median_ratio",
    "overhead_cases",
    "read_workloads",
    "score_margin",
    "settings_cases",
]
