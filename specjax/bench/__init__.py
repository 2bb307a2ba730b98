"""Measuring: whether text changed, and how fast it came."""

from specjax.bench._contest import Contest, Entry, Standing, stand_all
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
    precision_cases,
    settings_cases,
)
from specjax.bench._peer import Peer
from specjax.bench._plan import (
    ClassPlan,
    Costs,
    Profile,
    Run,
    SpeculationPlan,
    plan_class,
)
from specjax.bench._plan_make import make_plan, model_shape, roofline_costs
from specjax.bench._plan_measure import Decoding, draft_case, measure_costs
from specjax.bench._plan_plot import plot_plan
from specjax.bench._plan_settings import (
    PlanSettings,
    parse_acceptance,
    parse_batches,
    parse_numbers,
)
from specjax.bench._plan_show import describe, render_plan
from specjax.bench._skip_costs import SkipCosts
from specjax.bench._skip_make import (
    SkipRow,
    SkipSearchResult,
    SkipSearchSettings,
    search_layer_skip,
)
from specjax.bench._skip_search import SkipDraft
from specjax.bench._skip_show import render_skip_search, write_skip_search
from specjax.bench._speed import Measurement, measure, median_ratio
from specjax.bench._workloads import WORKLOADS, read_workloads

__all__ = [
    "WORKLOADS",
    "Case",
    "ClassPlan",
    "Comparison",
    "Contest",
    "Costs",
    "Decoding",
    "Difference",
    "Entry",
    "Flips",
    "Measurement",
    "Peer",
    "PlanSettings",
    "Profile",
    "Run",
    "SkipCosts",
    "SkipDraft",
    "SkipRow",
    "SkipSearchResult",
    "SkipSearchSettings",
    "SpeculationPlan",
    "Standing",
    "bare_pass",
    "bare_prefill",
    "capacity_cases",
    "compare",
    "count_flips",
    "describe",
    "draft_case",
    "engine_pass",
    "first_token_case",
    "interleave",
    "make_plan",
    "measure",
    "measure_costs",
    "median_ratio",
    "model_shape",
    "overhead_cases",
    "parse_acceptance",
    "parse_batches",
    "parse_numbers",
    "plan_class",
    "plot_plan",
    "precision_cases",
    "read_workloads",
    "render_plan",
    "render_skip_search",
    "roofline_costs",
    "score_margin",
    "search_layer_skip",
    "settings_cases",
    "stand_all",
    "write_skip_search",
]
