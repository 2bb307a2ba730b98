"""What the engine adds to the model, and what a large cache costs."""

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import verify
from specjax.bench._speed import measure
from specjax.decode import Engine, Plan, Request, prefill_chunks, programs
from specjax.drafters import Drafter, plain, prompt_lookup
from specjax.ops.platform import compiler_options
from specjax.sampling import Settings

if TYPE_CHECKING:
    from specjax.weights import Model

#: A match this long never comes up, so lookup searches and proposes nothing.
_NEVER = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to time.

    Attributes:
      name: for tables.
      run: does ``n`` passes (or one prefill) and returns the seconds of one.
    """

    name: str
    run: Callable[[int], float]


def bare_pass(model: "Model", *, width: int, capacity: int, length: int) -> Case:
    """Times forward passes alone in a loop on the device: no rule, no commit.

    Args:
      model: the model.
      width: rows of a pass.
      capacity: of the cache.
      length: tokens in the cache before the first pass.

    Returns:
      The case.
    """
    target = model.target

    def loop(params, cache, tokens, n):
        def body(carry):
            i, cache, tokens = carry
            logits, _, cache = target.forward(params, tokens, cache)
            cache = target.commit(cache, jnp.ones((1,), jnp.int32))
            # The next tokens depend on these logits, as in decoding.
            return i + 1, cache, (logits[:, :, 0] > 0).astype(jnp.int32)

        return lax.while_loop(lambda c: c[0] < n, body, (0, cache, tokens))

    compiled = jax.jit(loop, donate_argnums=1, compiler_options=compiler_options())
    held = [target.init_cache(1, capacity)]
    tokens = jnp.ones((1, width), jnp.int32)

    def run(n: int) -> float:
        # A copy: the length is donated with the cache.
        cache = held[0].replace(length=jnp.full((1,), length, jnp.int32))
        began = time.perf_counter()
        _, held[0], _ = jax.block_until_ready(compiled(model.params, cache, tokens, n))
        return (time.perf_counter() - began) / n

    return Case(f"bare forward, {width} rows", run)


def engine_pass(
    model: "Model",
    *,
    name: str,
    drafter: Drafter,
    widths: tuple[int, ...],
    capacity: int,
    length: int,
    temperature: float = 0.0,
) -> Case:
    """Times whole passes of the decode loop, of a drafter that proposes nothing.

    Args:
      model: the model.
      name: for tables.
      drafter: the drafter; its own cost is part of the pass.
      widths: widths of the plan.
      capacity: of a slot.
      length: tokens of the prompt.
      temperature: of the row; above 0 the warp and the noise are part of the pass.

    Returns:
      The case.
    """
    plan = Plan(model.target, drafter, verify.coupled, 1, capacity, widths)
    compiled = programs(plan, capacity)
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, model.config.vocab_size, (length,))

    def run(n: int) -> float:
        state = compiled.init()
        tokens = np.zeros((state.tokens.shape[1],), np.int32)
        tokens[:length] = prompt
        state = compiled.insert(
            state,
            np.int32(0),
            tokens,
            np.int32(length),
            np.int32(length + n + 1),
            np.full((plan.n_stop_ids,), -1, np.int32),
            Settings.of_row(temperature, 0, 1.0, 0.0, 1),
        )
        full = jnp.full((1,), length - 1, jnp.int32)
        state = state.replace(cache=state.cache.replace(length=full))
        jax.block_until_ready(state)
        start = np.full((1,), length, np.int32)
        began = time.perf_counter()
        out = compiled.run(model.params, None, state, start, np.int32(n))
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / n

    return Case(name, run)


def bare_prefill(model: "Model", *, length: int, capacity: int) -> Case:
    """Times the forwards that a prompt of some length needs, and nothing else."""
    target = model.target

    def chunk(params, tokens, cache):
        _, _, cache = target.forward(params, tokens, cache, with_logits=False)
        return target.commit(cache, jnp.full((1,), tokens.shape[1], jnp.int32))

    compiled = jax.jit(chunk, donate_argnums=2, compiler_options=compiler_options())

    def run(n: int) -> float:
        cache = jax.block_until_ready(target.init_cache(1, capacity))
        began = time.perf_counter()
        for size, _ in prefill_chunks(length):
            cache = compiled(model.params, jnp.ones((1, size), jnp.int32), cache)
        jax.block_until_ready(cache)
        return time.perf_counter() - began

    return Case(f"bare prefill, {length} tokens", run)


def overhead_cases(
    model: "Model", *, gamma: int, capacity: int, length: int
) -> list[Case]:
    """Returns the cases of the overhead table, bare and whole, narrow and wide."""
    wide = gamma + 1
    whole = dict(capacity=capacity, length=length)
    searching = prompt_lookup(gamma, min_ngram=_NEVER, max_ngram=_NEVER)

    def engine(
        name: str, drafter: Drafter, widths: tuple[int, ...], temperature: float = 0.0
    ) -> Case:
        return engine_pass(
            model,
            name=name,
            drafter=drafter,
            widths=widths,
            temperature=temperature,
            **whole,
        )

    return [
        bare_pass(model, width=1, **whole),
        engine("plain", plain(), (1,)),
        engine("plain, T=0.7", plain(), (1,), 0.7),
        engine("prompt lookup, no match", searching, (1, wide)),
        bare_pass(model, width=wide, **whole),
        engine(f"whole pass, {wide} rows", searching, (wide,)),
        engine(f"whole pass, {wide} rows, T=0.7", searching, (wide,), 0.7),
    ]


def capacity_cases(
    model: "Model", *, gamma: int, capacities: tuple[int, ...], length: int
) -> list[Case]:
    """Returns the same pass in caches of several capacities."""
    return [
        engine_pass(
            model,
            name=f"capacity {capacity}",
            drafter=prompt_lookup(gamma, min_ngram=_NEVER, max_ngram=_NEVER),
            widths=(1, gamma + 1),
            capacity=capacity,
            length=length,
        )
        for capacity in capacities
    ]


def first_token_case(model: "Model", *, length: int, capacity: int) -> Case:
    """Times a request of one token on a warm engine, its prefill included."""
    engine = Engine(
        model,
        drafter=prompt_lookup(6),
        rule=verify.coupled,
        batch_size=1,
        capacity=capacity,
    )
    request = Request(prompt_ids=(5,) * length, max_new_tokens=1, ignore_eos=True)

    def run(n: int) -> float:
        result = measure(engine, request)
        return result.prefill_s + result.decode_s

    return Case(f"first token, prompt of {length}", run)


def interleave(cases: list[Case], *, n: int, rounds: int) -> dict[str, list[float]]:
    """Runs the cases in turn, again and again.

    Args:
      cases: what to time; each is run once before, to compile.
      n: passes of a run.
      rounds: runs of each case that count.

    Returns:
      Seconds a pass by case name, one a round.
    """
    for case in cases:
        case.run(2)
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            seconds[case.name].append(case.run(n))
    return seconds
