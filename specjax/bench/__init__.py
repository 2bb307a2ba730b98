"""Measuring: whether text changed, and how fast it came."""

from specjax.bench._equivalence import Comparison, Difference, compare, score_margin
from specjax.bench._peer import Peer
from specjax.bench._speed import Measurement, measure, median_ratio
from specjax.bench._workloads import WORKLOADS, read_workloads

__all__ = [
    "WORKLOADS",
    "Comparison",
    "Difference",
    "Measurement",
    "Peer",
    "compare",
    "measure",
    "median_ratio",
    "read_workloads",
    "score_margin",
]
