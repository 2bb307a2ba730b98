"""The arithmetic of speculation: what it gains, when, and on what.

Pure functions in float64 NumPy; times in seconds (``*_s``), sizes in bytes
(``*_bytes``), rates a second (``*_per_s``). One pass of the target over gamma drafts
commits E tokens and takes gamma c + v plain steps, so

    speed-up = E / (gamma c + v)

- acceptance: ``acceptance_from_logits``, ``expected_tokens_per_pass`` (i.i.d.),
  ``expected_tokens_from_conditional`` (by position),
  ``expected_tokens_from_log_ratios`` (by rule);
- speed: ``speedup``, ``speedup_curve``, ``best_gamma``, ``verify_cost_from_times``,
  and the limits ``speedup_ceiling``, ``break_even_acceptance``,
  ``operations_factor``;
- devices: ``get_hardware``, ``Hardware``, ``measure_hardware``, ``ridge_point``,
  ``free_rows``, ``pass_time``, ``passes_per_second_ceiling``;
- both together: ``Deployment``, ``predict_speedup``, ``losing_batch``,
  ``gaining_batches``, ``gaining_contexts``, ``advise``, ``advise_deployment``.

For example, a drafter of a tenth of the target's cost that is right at 0.7::

    >>> from specjax import theory
    >>> theory.best_gamma(0.7, cost_ratio=0.1).gamma
    4
    >>> round(theory.speedup(0.7, 4, cost_ratio=0.1), 2)
    1.98
"""

from specjax.theory._acceptance import (
    conditional_from_survival,
    expected_tokens_from_conditional,
    expected_tokens_per_pass,
    survival_from_conditional,
)
from specjax.theory._advice import Advice, advise, advise_deployment
from specjax.theory._deployment import (
    Deployment,
    gaining_batches,
    gaining_contexts,
    losing_batch,
    predict_cost_ratio,
    predict_speedup,
    predict_verify_cost,
)
from specjax.theory._hardware import Hardware, free_rows, ridge_point
from specjax.theory._hardware_table import HARDWARE, get_hardware
from specjax.theory._laws import (
    Acceptance,
    acceptance_from_logits,
    expected_tokens_from_log_ratios,
)
from specjax.theory._limits import (
    break_even_acceptance,
    operations_factor,
    speedup_ceiling,
)
from specjax.theory._measure import measure_hardware
from specjax.theory._model_shape import ModelShape
from specjax.theory._pass_cost import VerifyCost, verify_cost_from_times
from specjax.theory._roofline import PassTime, pass_time, passes_per_second_ceiling
from specjax.theory._speedup import (
    BestGamma,
    best_gamma,
    speedup,
    speedup_curve,
    speedup_from_tokens,
)

__all__ = [
    "HARDWARE",
    "Acceptance",
    "Advice",
    "BestGamma",
    "Deployment",
    "Hardware",
    "ModelShape",
    "PassTime",
    "VerifyCost",
    "acceptance_from_logits",
    "advise",
    "advise_deployment",
    "best_gamma",
    "break_even_acceptance",
    "conditional_from_survival",
    "expected_tokens_from_conditional",
    "expected_tokens_from_log_ratios",
    "expected_tokens_per_pass",
    "free_rows",
    "gaining_batches",
    "gaining_contexts",
    "get_hardware",
    "losing_batch",
    "measure_hardware",
    "operations_factor",
    "pass_time",
    "passes_per_second_ceiling",
    "predict_cost_ratio",
    "predict_speedup",
    "predict_verify_cost",
    "ridge_point",
    "speedup",
    "speedup_ceiling",
    "speedup_curve",
    "speedup_from_tokens",
    "survival_from_conditional",
    "verify_cost_from_times",
]
