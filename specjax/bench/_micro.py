"""What the engine adds to the model, and what a large cache costs."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import verify
from specjax.bench._speed import measure
from specjax.bench._workloads import WORKLOADS
from specjax.decode import (
    NO_CONTROLS,
    Controls,
    Engine,
    Plan,
    Request,
    prefill_chunks,
    programs,
    row_controls,
    with_masks,
)
from specjax.drafters import (
    QUANTIZED_GROUPS,
    Drafter,
    lower_precision,
    plain,
    prompt_lookup,
)
from specjax.models import Quantization, decoder_target, quantize
from specjax.ops.linear import preferred_layout
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


def bare_pass(
    model: "Model",
    *,
    width: int,
    capacity: int,
    length: int,
    batch: int = 1,
    start: int = 0,
) -> Case:
    """Times forward passes alone in a loop on the device: no rule, no commit.

    Args:
      model: the model.
      width: rows of a pass.
      capacity: of the cache.
      length: tokens in the cache before the first pass.
      batch: rows of the batch.
      start: first block that runs; the others are taken to have run already.

    Returns:
      The case.

    Raises:
      ValueError: the target cannot be entered at a block.
    """
    target, halves = model.target, model.target.halves
    if start and halves is None:
        raise ValueError(f"{start=}: {model.name} cannot be entered at a block.")

    def forward(params, tokens, cache):
        if not start or halves is None:
            return target.forward(params, tokens, cache)
        hidden = jnp.zeros((*tokens.shape, target.spec.width), jnp.float32)
        # Not the same row each time, or the compiler would compute it once.
        hidden += tokens[..., None]
        return halves.finish(params, hidden, cache, start=start)

    def loop(params, cache, tokens, n):
        def body(carry):
            i, cache, tokens = carry
            logits, _, cache = forward(params, tokens, cache)
            cache = target.commit(cache, jnp.ones((batch,), jnp.int32))
            # The next tokens depend on these logits, as in decoding.
            return i + 1, cache, (logits[:, :, 0] > 0).astype(jnp.int32)

        return lax.while_loop(lambda c: c[0] < n, body, (0, cache, tokens))

    compiled = jax.jit(loop, donate_argnums=1, compiler_options=compiler_options())
    held = [target.init_cache(batch, capacity)]
    tokens = jnp.ones((batch, width), jnp.int32)

    def run(n: int) -> float:
        # A copy: the length is donated with the cache.
        cache = held[0].replace(length=jnp.full((batch,), length, jnp.int32))
        began = time.perf_counter()
        _, held[0], _ = jax.block_until_ready(compiled(model.params, cache, tokens, n))
        return (time.perf_counter() - began) / n

    entered = f" from block {start}" if start else ""
    return Case(f"bare forward{entered}, {batch} x {width} rows", run)


def engine_pass(
    model: "Model",
    *,
    name: str,
    drafter: Drafter,
    widths: tuple[int, ...],
    capacity: int,
    length: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    controls: Controls = NO_CONTROLS,
    batch: int = 1,
) -> Case:
    """Times whole passes of the decode loop, of a drafter that proposes nothing.

    Args:
      model: the model.
      name: for tables.
      drafter: the drafter; its own cost is part of the pass.
      widths: widths of the plan.
      capacity: of a slot.
      length: tokens of the prompt.
      temperature: of the rows; above 0 the warp and the noise are part of the pass.
      top_p: of the rows.
      controls: of the rows.
      batch: rows of the batch.

    Returns:
      The case.
    """
    vocab_size = model.config.vocab_size
    spec = controls.spec
    plan = Plan(
        model.target,
        drafter,
        verify.coupled,
        batch,
        capacity,
        widths,
        controls=spec,
    )
    compiled = programs(plan, capacity)
    prompt = prompt_ids(model, length)

    def run(n: int) -> float:
        state = compiled.init()
        tokens = np.zeros((state.tokens.shape[1],), np.int32)
        tokens[:length] = prompt
        if controls.token_mask is not None:
            state = with_masks(state, controls.token_mask.transitions)
        for row in range(batch):
            state = compiled.insert(
                state,
                np.int32(row),
                tokens,
                np.int32(length),
                np.int32(length + n + 1),
                np.int32(drafter.spec.gamma),
                np.full((plan.n_stop_ids,), -1, np.int32),
                Settings.of_row(temperature, 0, top_p, 0.0, row),
                row_controls(
                    controls,
                    spec,
                    prompt_ids=tokens[:length].tolist(),
                    size=len(tokens),
                    vocab_size=vocab_size,
                    mask_start=controls.token_mask.start if controls.token_mask else -1,
                ),
                np.int32(row),
                np.int32(0),
            )
            for size, n_real in prefill_chunks(length - 1):
                state = compiled.prefill(
                    model.params, None, state, row, np.int32(n_real), size=size
                )
        jax.block_until_ready(state)
        start = np.full((batch,), length, np.int32)
        began = time.perf_counter()
        out = compiled.run(model.params, None, state, start, np.int32(n))
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / n

    return Case(name, run)


def prompt_ids(model: "Model", length: int) -> np.ndarray:
    """Returns tokens of real text: what filters cost depends on how flat laws are."""
    if model.tokenizer is None:
        rng = np.random.default_rng(0)
        return rng.integers(0, model.config.vocab_size, (length,))
    # The quoting prompts share their passages, which lookup would find.
    texts = WORKLOADS["quoting"][:1] + WORKLOADS["chat"] + WORKLOADS["code"]
    ids = model.tokenizer.encode(" ".join(texts))
    return np.resize(np.asarray(ids, np.int32), (length,))


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
    whole: dict[str, Any] = dict(capacity=capacity, length=length)
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


def settings_cases(
    model: "Model", *, gamma: int, capacity: int, length: int, batch: int
) -> list[Case]:
    """Returns what rule, warp and request settings add to a wide pass of a batch."""
    whole: dict[str, Any] = dict(capacity=capacity, length=length, batch=batch)
    searching = prompt_lookup(gamma, min_ngram=_NEVER, max_ngram=_NEVER)
    penalties = Controls(repetition_penalty=1.1, frequency_penalty=0.2)
    everything = Controls(
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        logit_bias={1: 1.0},
        min_new_tokens=8,
    )

    def engine(name: str, **settings: Any) -> Case:
        return engine_pass(
            model,
            name=f"{name}, {batch} x {gamma + 1} rows",
            drafter=searching,
            widths=(gamma + 1,),
            **whole,
            **settings,
        )

    return [
        bare_pass(model, width=gamma + 1, **whole),
        engine("whole pass, T=0"),
        engine("T=0.7", temperature=0.7),
        engine("T=0.7, top_p 0.9", temperature=0.7, top_p=0.9),
        engine("T=0, penalties", controls=penalties),
        engine("T=0.7, penalties, bias", temperature=0.7, controls=everything),
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


def precision_cases(
    model: "Model", *, batch: int, length: int, capacity: int
) -> list[Case]:
    """Returns a draft's pass in the model's type and smaller ones, with what it reads.

    Args:
      model: the model; a float32 one is timed in bfloat16 as well.
      batch: rows of the batch, each with one token.
      length: tokens in the cache before the first pass.
      capacity: of the cache.

    Returns:
      Cases named by type and by megabytes of weights that a pass reads.
    """
    forms = {model.config.dtype: (model.target, model.params)}
    if model.config.dtype == "float32":
        layout = preferred_layout(jnp.dtype("bfloat16"))
        config = dataclasses.replace(
            model.config, dtype="bfloat16", kernel_layout=layout
        )
        lower = lower_precision(model, dtype="bfloat16").params
        assert lower is not None
        forms["bfloat16"] = decoder_target(config), lower
    for bits, group in QUANTIZED_GROUPS.items():
        config, params = quantize(model.config, model.params, Quantization(bits, group))
        forms[f"int{bits}"] = decoder_target(config), params
    cases = []
    for name, (target, params) in forms.items():
        form = dataclasses.replace(model, target=target, params=params)
        case = bare_pass(form, width=1, capacity=capacity, length=length, batch=batch)
        weights = sum(x.nbytes for x in jax.tree.leaves(params))
        # Of an embedding that is no head a pass reads some rows.
        looked_up = params["embedding"].nbytes if "head" in params else 0
        megabytes = f"{(weights - looked_up) / 1e6:.0f} MB"
        cases.append(Case(f"{batch} x 1 rows in {name}, {megabytes}", case.run))
    return cases


def first_token_case(model: "Model", *, length: int, capacity: int) -> Case:
    """Times a request of one token on a warm engine, its prefill included."""
    engine = Engine(
        model,
        drafter=prompt_lookup(6),
        rule=verify.coupled,
        batch_size=1,
        capacity=capacity,
    )
    # Never the prompt before: its prefill would be shared.
    first = itertools.count()

    def run(n: int) -> float:
        ids = (5 + next(first) % 1000,) * length
        request = Request(prompt_ids=ids, max_new_tokens=1, ignore_eos=True)
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
