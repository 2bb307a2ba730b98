"""Does speculation change the ids? The users' proof."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from specjax import drafters as drafter_zoo
from specjax.decode import (
    Completion,
    Engine,
    Request,
    controls_after,
    fit_capacity,
    prefill_chunks,
    stop_ids,
    union_masks,
    union_spec,
)
from specjax.drafters import BoundDrafter, Drafter, unbind
from specjax.sampling import (
    Settings,
    apply_controls,
    gumbel_margin,
    gumbel_noise,
    warp,
)
from specjax.typing import Array
from specjax.verify import VerifyRule

if TYPE_CHECKING:
    from specjax.weights import Model


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two runs of one request part.

    Attributes:
      id: of the request.
      index: of the first output id that differs, from 0.
      off: the id without speculation, or None where that run had ended.
      on: the id with speculation, or None where that run had ended.
      margin: how much more the first of the two ids scores than the second, in the
        scores the choice is made on (logits at temperature 0; warped scores plus
        noise under ``coupled``); None where a run had ended. A margin near 0 is a
        floating-point tie, a large one is a bug.
    """

    id: object
    index: int
    off: int | None
    on: int | None
    margin: float | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Speculation on against off, for some requests.

    Attributes:
      drafter: name of the drafter.
      temperature: of the requests.
      n: requests compared.
      n_tokens: output ids compared.
      differences: one for each request whose ids differ.
      tokens_per_pass: with speculation on.
    """

    drafter: str
    temperature: float
    n: int
    n_tokens: int
    differences: tuple[Difference, ...]
    tokens_per_pass: float


def compare(
    model: "Model",
    requests: Sequence[Request],
    *,
    drafter: Drafter | BoundDrafter,
    rule: VerifyRule,
    exact: bool,
    batch_size: int,
    baseline: Sequence[Completion] | None = None,
) -> tuple[Comparison, list[Completion]]:
    """Generates each request with speculation on and off and compares the ids.

    Args:
      model: the model.
      requests: the requests, all of one temperature.
      drafter: the drafter of the "on" side; "off" is plain decoding.
      rule: the verify rule of both sides.
      exact: whether both sides run in exact mode, at the width the drafter needs.
      batch_size: slots of both sides.
      baseline: the "off" completions, where an earlier call gave them.

    Returns:
      The comparison, and the "off" completions in the order of the requests.
    """
    spec = unbind(drafter, None)[0].spec
    width = spec.gamma + 1
    need = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + width
    capacity = fit_capacity(need, model.target.spec.max_context)

    def run(drafter: Drafter | BoundDrafter) -> list[Completion]:
        engine = Engine(
            model,
            drafter=drafter,
            rule=rule,
            batch_size=batch_size,
            capacity=capacity,
            exact=exact,
            width=width if exact else None,
            controls=union_spec([r.controls for r in requests]),
            token_masks=union_masks([r.controls for r in requests]),
        )
        done = {e.id: e.completion for e in engine.run(requests) if e.completion}
        return [done[r.id] for r in requests]

    off = list(baseline) if baseline is not None else run(drafter_zoo.plain())
    on = run(drafter)
    differences = [
        found
        for request, a, b in zip(requests, off, on, strict=True)
        if (found := _difference(model, request, a, b)) is not None
    ]
    passes = sum(c.stats.passes for c in on)
    committed = sum(c.stats.committed for c in on)
    comparison = Comparison(
        drafter=spec.name,
        temperature=requests[0].temperature,
        n=len(requests),
        n_tokens=sum(len(c.ids) for c in off),
        differences=tuple(differences),
        tokens_per_pass=committed / max(passes, 1),
    )
    return comparison, off


def _difference(
    model: "Model", request: Request, off: Completion, on: Completion
) -> Difference | None:
    if off.ids == on.ids:
        return None
    pairs = zip(off.ids, on.ids, strict=False)
    index = next(
        (i for i, (a, b) in enumerate(pairs) if a != b),
        min(len(off.ids), len(on.ids)),
    )
    a = off.ids[index] if index < len(off.ids) else None
    b = on.ids[index] if index < len(on.ids) else None
    margin = None
    if a is not None and b is not None:
        prefix = (*request.prompt_ids, *off.ids[:index])
        margin = score_margin(model, prefix, request, a, b)
    return Difference(request.id, index, a, b, margin)


def score_margin(
    model: "Model", prefix: Sequence[int], request: Request, a: int, b: int
) -> float:
    """Computes by how much id ``a`` outscores id ``b`` after a prefix.

    Args:
      model: the model.
      prefix: prompt and output ids before the choice.
      request: whose sampling settings apply.
      a: an id.
      b: another.

    Returns:
      The difference of the scores ``coupled`` takes the argmax of; at temperature 0
      the difference of the logits.
    """
    logits = _logits(model, prefix)
    n_prompt = len(request.prompt_ids)
    controls = controls_after(
        request.controls,
        prompt_ids=prefix[:n_prompt],
        output_ids=prefix[n_prompt:],
        vocab_size=logits.shape[-1],
    )
    none = jnp.zeros((1, 0), jnp.int32)
    length = jnp.full((1,), len(prefix), jnp.int32)
    stops = jnp.asarray([stop_ids(model, request) or [-1]], jnp.int32)
    logits = apply_controls(
        logits, controls, tokens=none, length=length, stop_ids=stops
    )
    if request.temperature == 0:
        return float(logits[0, 0, a] - logits[0, 0, b])
    settings = Settings.full(
        1,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        seed=request.seed,
    )
    noise = gumbel_noise(settings.seed, length[:, None], logits.shape[-1])
    return float(gumbel_margin(warp(logits, settings)[0, 0], noise[0, 0], a, b))


def _logits(model: "Model", prefix: Sequence[int]) -> Array:
    target = model.target
    capacity = fit_capacity(len(prefix) + 1, target.spec.max_context)
    cache = target.init_cache(1, capacity)
    done, logits = 0, jnp.zeros((1, 1, target.spec.vocab_size))
    for size, n in prefill_chunks(len(prefix)):
        chunk = np.zeros((1, size), np.int32)
        chunk[0, :n] = prefix[done : done + n]
        logits, _, cache = target.forward(model.params, chunk, cache)
        cache, done = target.commit(cache, jnp.full((1,), n)), done + n
        logits = logits[:, n - 1 : n]
    return logits
