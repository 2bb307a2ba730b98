"""Making a plan: measuring what is not given, or asking the roofline."""

from collections.abc import Callable, Sequence

import numpy as np

from specjax import drafters, theory
from specjax.bench._plan import Costs, Profile, SpeculationPlan, plan_class
from specjax.bench._plan_measure import Decoding, measure_costs, pass_capacity
from specjax.bench._plan_settings import PlanSettings
from specjax.bench._workloads import WORKLOADS, read_workloads
from specjax.decode import encode_prompt
from specjax.models import DecoderConfig
from specjax.weights import load, load_config

#: Batches that a device of the table is asked about.
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def make_plan(
    settings: PlanSettings, *, tell: Callable[[str], object] = lambda line: None
) -> SpeculationPlan:
    """Measures what is not given, on this machine, and applies the theory.

    With a device of the table nothing is measured and no weights are read: costs are
    the roofline's, for the shape that the target's configuration tells.

    Args:
      settings: what to plan for.
      tell: is given a line before each thing that takes time.

    Returns:
      The plan.

    Raises:
      ValueError: the target, the prompts or the numbers do not fit; before anything is
        measured.
      OSError: a file cannot be read.
    """
    longest = settings.longest
    deployment = None
    if settings.device is not None:
        deployment = _deployment(settings)
        costs = roofline_costs(deployment, settings.gamma, longest, settings.n_context)
        profiles = _given(settings)
    else:
        costs, profiles = _measure(settings, tell)
    plans = tuple(
        plan_class(
            profile,
            costs,
            gamma=settings.gamma,
            max_gamma=longest,
            deployment=deployment,
            n_context=settings.n_context,
        )
        for profile in profiles
    )
    return SpeculationPlan(settings, longest, costs, plans)


def _given(settings: PlanSettings) -> list[Profile]:
    return [Profile(n, a) for n, a in (settings.acceptance or {}).items()]


def _measure(
    settings: PlanSettings, tell: Callable[[str], object]
) -> tuple[Costs, list[Profile]]:
    """Loads the target and measures what is not given; nothing, if all is."""
    c, v, gamma = settings.cost_ratio, settings.verify_cost, settings.gamma
    profiles, longest = _given(settings), settings.longest
    if profiles and c is not None and v is not None:
        return Costs(c, v), profiles
    groups = {} if profiles else _prompts(settings)
    model = load(settings.target, dtype=settings.dtype or "float32")
    pass_capacity(model, settings.n_context, longest)
    make = lambda gamma: drafters.for_target(settings.drafter, gamma, model)
    decoding = None
    if groups:
        decoding = Decoding(
            model,
            [make(g) for g in sorted({gamma, longest})],
            {n: [encode_prompt(model, p) for p in ps] for n, ps in groups.items()},
            max_new_tokens=settings.max_new_tokens,
        )
    if c is not None and v is not None:
        costs = Costs(c, v)
    else:
        tell("compiling and timing passes")
        costs = measure_costs(
            model,
            make(gamma),
            max_gamma=longest,
            n_context=settings.n_context,
            batches=settings.batches,
            rounds=settings.rounds,
            cost_ratio=c,
            verify_cost=v,
        )
    for name in groups:
        assert decoding is not None
        tell(f"decoding {name}")
        profiles.append(decoding.profile(name, rounds=settings.rounds))
    return costs, profiles


def _prompts(settings: PlanSettings) -> dict[str, Sequence[str]]:
    groups = read_workloads(settings.prompts) if settings.prompts else WORKLOADS
    if not groups:
        raise ValueError(
            f"prompts={settings.prompts} holds no prompts; give some, or leave it out "
            "for the built-in ones."
        )
    return {name: prompts[: settings.per_class] for name, prompts in groups.items()}


def _deployment(settings: PlanSettings) -> theory.Deployment:
    """Describes the target, a drafter of c times its cost, and the device."""
    config = load_config(settings.target, dtype=settings.dtype or "bfloat16")
    assert settings.device is not None
    target = model_shape(config)
    c = settings.cost_ratio
    if c is None and settings.drafter not in drafters.REGISTRY:
        raise ValueError(
            f"The cost of drafter {settings.drafter!r} on {settings.hardware!r} is not "
            "known; give cost_ratio, the time of a draft step over a target step (0 "
            "for one that only looks up)."
        )
    return theory.Deployment(
        target=target,
        hardware=settings.device,
        draft=_scaled(target, c) if c else None,
        rate="fp32" if config.dtype == "float32" else "bf16",
    )


def model_shape(config: DecoderConfig) -> theory.ModelShape:
    """Counts what a pass of a decoder reads and computes.

    Args:
      config: the decoder. Sliding windows count as full attention.

    Returns:
      The counts, parameters and cache in the decoder's dtype.
    """
    size = 4.0 if config.dtype == "float32" else 2.0
    return theory.ModelShape.decoder(
        n_layers=config.n_layers,
        d_model=config.width,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_width=config.head_width,
        d_ff=config.ff_width,
        vocab_size=config.vocab_size,
        bytes_per_param=size,
        kv_bytes_per_element=size,
        activation_bytes_per_element=size,
    )


def _scaled(shape: theory.ModelShape, c: float) -> theory.ModelShape:
    """Makes a draft model that takes c times the target's time in all it does."""
    return theory.ModelShape(
        n_params=c * shape.n_params,
        weight_bytes=c * shape.weight_bytes,
        kv_bytes_per_token=c * shape.kv_bytes_per_token,
        attention_flops=c * shape.attention_flops,
        activation_bytes_per_row=c * shape.activation_bytes_per_row,
    )


def roofline_costs(
    deployment: theory.Deployment, gamma: int, max_gamma: int, n_context: int
) -> Costs:
    """Predicts costs for a device that need not be here.

    Args:
      deployment: target, drafter and device.
      gamma: draft tokens a pass in use.
      max_gamma: the longest draft to consider.
      n_context: cached tokens a sequence.

    Returns:
      The costs.

    Raises:
      ValueError: the device's rate for the number format is not known.
    """
    at = {"n_context": n_context}
    v = theory.predict_verify_cost(deployment, np.arange(1, max_gamma + 2), **at)
    batches = np.asarray(_BATCHES)
    wide = theory.predict_verify_cost(deployment, gamma + 1, batch=batches, **at)
    one_row = theory.pass_time(
        deployment.target, deployment.hardware, rate=deployment.rate, **at
    )
    return Costs(
        cost_ratio=float(theory.predict_cost_ratio(deployment, **at)),
        verify_cost=tuple(map(float, v)),
        by_batch=dict(zip(_BATCHES, map(float, wide), strict=True)),
        one_row_s=float(one_row.total_s),
    )
