"""``generate`` and ``stream``: a few lines each on the engine."""

import dataclasses
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from specjax import drafters as drafter_zoo
from specjax import verify as rules
from specjax.decode._controls import NO_CONTROLS, Controls, union_masks, union_spec
from specjax.decode._engine import PASSES_PER_CALL, Engine, Request
from specjax.decode._results import Completion, Generation
from specjax.drafters import BoundDrafter, Drafter, unbind
from specjax.models import CACHE_SLACK
from specjax.sampling import check_whole
from specjax.text import IncrementalDetokenizer
from specjax.typing import Params
from specjax.verify import VerifyRule

if TYPE_CHECKING:
    from specjax.weights import Model

#: A prompt: text, a list of chat messages, or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int] | np.ndarray

_SMALLEST_SLOTS = 256


def encode_prompt(
    model: "Model", prompt: Prompt, *, chat: bool | None = None
) -> tuple[int, ...]:
    """Turns a prompt into ids.

    Args:
      model: the model whose tokenizer and chat template are used.
      prompt: a text, a list of {"role", "content"} messages, or ids.
      chat: whether a text is put into the chat template as the user's message; None
        does so where the model has a template.

    Returns:
      The ids.

    Raises:
      ValueError: the prompt is empty, or a template is needed and there is none.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError("The prompt is empty: it needs at least one character.")
        if chat is None:
            chat = model.chat_template is not None
        if not chat:
            return tuple(model.need_tokenizer().encode(prompt))
        messages = [{"role": "user", "content": prompt}]
        return _encode_messages(model, messages)
    if len(prompt) == 0:
        raise ValueError("The prompt is empty: it needs at least one token or message.")
    if isinstance(prompt[0], Mapping):
        return _encode_messages(model, cast(Sequence[Mapping[str, str]], prompt))
    try:
        return tuple(operator.index(token) for token in cast(Sequence[int], prompt))
    except TypeError:
        raise ValueError(
            f"A prompt of ids must hold whole numbers; got {list(prompt)[:8]!r}."
        ) from None


def _stop_strings(stop: Sequence[str]) -> tuple[str, ...]:
    """Keeps one string from being taken for its letters."""
    if isinstance(stop, str):
        raise TypeError(f"stop={stop!r} must be a list of strings: [{stop!r}].")
    return tuple(stop)


def _encode_messages(
    model: "Model", messages: Sequence[Mapping[str, str]]
) -> tuple[int, ...]:
    if model.chat_template is None:
        raise ValueError(
            f"{model.name} has no chat template; pass the prompt as text with "
            "chat=False, or as ids."
        )
    text = model.chat_template.render(messages, add_generation_prompt=True)
    return tuple(model.need_tokenizer().encode(text, add_special_tokens=False))


def resolve(
    model: "Model",
    drafter: Drafter | BoundDrafter | str | None,
    gamma: int,
    rule: VerifyRule | str,
    draft_params: Params | None = None,
) -> tuple[BoundDrafter, VerifyRule]:
    """Looks a drafter and a rule up by name where names are given.

    Args:
      model: what is drafted for.
      drafter: a drafter, its name, or None for plain decoding.
      gamma: draft tokens a pass, for a name.
      rule: a rule or its name.
      draft_params: the drafter's parameters, where it has any and does not bring them.

    Returns:
      The drafter with its parameters, and the rule.

    Raises:
      ValueError: a name is not known; the message lists those that are.
    """
    rule = rules.by_name(rule) if isinstance(rule, str) else rule
    if drafter is None:
        drafter = drafter_zoo.plain()
    elif isinstance(drafter, str):
        drafter = drafter_zoo.for_target(drafter, gamma, model)
        if drafter.params is None:  # or the caller has them, as those of suffix
            drafter = drafter.drafter
    return BoundDrafter(*unbind(drafter, draft_params)), rule


def fit_capacity(need: int, limit: int) -> int:
    """Returns a cache capacity for a need, one of few, so that few compile.

    Args:
      need: tokens a slot must hold.
      limit: the model's context.

    Returns:
      The smallest power of two, less the cache's own slack, that holds the need; at
      most the limit.
    """
    slots = _SMALLEST_SLOTS
    while slots - CACHE_SLACK < need:
        slots *= 2
    return min(slots - CACHE_SLACK, limit)


def generate(
    model: "Model",
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: Drafter | BoundDrafter | str | None = "prompt_lookup",
    gamma: int = 6,
    rule: VerifyRule | str = "coupled",
    max_new_tokens: int = 128,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    max_drafts: int | None | Sequence[int | None] = None,
    controls: Controls | Sequence[Controls] = NO_CONTROLS,
    n: int = 1,
    top_logprobs: int = 0,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    chat: bool | None = None,
    exact: bool = False,
    width: int | None = None,
    batch_size: int | None = None,
    capacity: int | None = None,
    draft_params: Params | None = None,
) -> Generation:
    """Generates text for one prompt or several.

    Args:
      model: from ``specjax.load``.
      prompts: one prompt or a list of them; each a text, a list of chat messages, or
        token ids.
      drafter: a drafter, a name of the registry, or None for plain decoding.
      gamma: draft tokens a pass, when the drafter is a name.
      rule: a verify rule or its name.
      max_new_tokens: most ids to generate for each prompt.
      temperature: 0 is greedy. This and the next five: one value, or one a prompt.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      seed: of a row's random numbers. One value is every prompt's seed, so that a
        prompt gives the same text alone and in a batch.
      max_drafts: most drafts that a pass verifies; 0 is plain decoding, None what the
        drafter likes.
      controls: penalties, bias, bans, forced tokens, constraints: for all prompts, or
        one a prompt.
      n: samples of each prompt, sharing one prefill; sample j has the seed seed + j
        (modulo 2**32) and gives what that seed gives alone.
      top_logprobs: most probable alternatives to report for each id.
      stop: strings that end a text; they are not part of it.
      ignore_eos: do not stop at the model's end ids.
      chat: see ``encode_prompt``.
      exact: ids identical with speculation on and off (rules greedy and coupled).
      width: rows of a pass when exact; None is gamma + 1.
      batch_size: slots; None is the number of samples, at most 8.
      capacity: tokens a slot may hold; None fits the longest request.
      draft_params: the drafter's parameters, where it has any and does not bring them.

    Returns:
      The completions in the order of the prompts, the n of a prompt together.

    Raises:
      ValueError: a prompt or setting cannot be served; nothing was generated.
    """
    began = time.perf_counter()
    requests = _requests(
        model,
        cast(Sequence[Prompt], [prompts] if _is_one(prompts) else prompts),
        n,
        chat,
        rows=dict(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_drafts=max_drafts,
            controls=controls,
        ),
        shared=dict(
            max_new_tokens=max_new_tokens,
            stop=_stop_strings(stop),
            ignore_eos=ignore_eos,
            top_logprobs=top_logprobs,
        ),
    )
    engine = _engine(
        model,
        requests,
        drafter=drafter,
        gamma=gamma,
        rule=rule,
        exact=exact,
        width=width,
        batch_size=min(len(requests), 8) if batch_size is None else batch_size,
        capacity=capacity,
        draft_params=draft_params,
    )
    for request in requests:
        engine.check(request)
    done: dict[int, Completion] = {}
    for event in engine.run(requests):
        if event.completion is not None:
            done[event.id] = event.completion  # type: ignore[index]
    completions = tuple(done[i] for i in range(len(requests)))
    pieces = tuple(_pieces(model, c.ids) for c in completions)
    return Generation(completions, pieces, time.perf_counter() - began)


def _requests(
    model: "Model",
    prompts: Sequence[Prompt],
    n: int,
    chat: bool | None,
    *,
    rows: Mapping[str, Any],
    shared: Mapping[str, Any],
) -> list[Request]:
    """Makes the requests of ``generate``: n a prompt, seeds counting up."""
    if not len(prompts):
        raise ValueError("prompts is empty: pass at least one prompt.")
    check_whole("n", n, 1, 2**31, "samples of each prompt")
    spread = {k: _per_prompt(k, v, len(prompts)) for k, v in rows.items()}
    requests: list[Request] = []
    for i, prompt in enumerate(prompts):
        own = {name: values[i] for name, values in spread.items()}
        ids = encode_prompt(model, prompt, chat=chat)
        first = Request(prompt_ids=ids, id=len(requests), **own, **shared)
        requests.append(first)
        for j in range(1, n):
            seed = (first.seed + j) % 2**32
            again = dataclasses.replace(first, id=len(requests), seed=seed)
            requests.append(again)
    return requests


def stream(
    model: "Model",
    prompt: Prompt,
    *,
    drafter: Drafter | BoundDrafter | str | None = "prompt_lookup",
    gamma: int = 6,
    rule: VerifyRule | str = "coupled",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    max_drafts: int | None = None,
    controls: Controls = NO_CONTROLS,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    chat: bool | None = None,
    exact: bool = False,
    width: int | None = None,
    capacity: int | None = None,
    draft_params: Params | None = None,
    passes_per_call: int = 4,
) -> Iterator[str]:
    """Generates text for one prompt, piece by piece.

    Args:
      model: from ``specjax.load``.
      prompt: a text, a list of chat messages, or token ids.
      drafter: see ``generate``; so for the other arguments.
      gamma: draft tokens a pass, when the drafter is a name.
      rule: a verify rule or its name.
      max_new_tokens: most ids to generate.
      temperature: 0 is greedy.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      seed: of the random numbers.
      max_drafts: most drafts that a pass verifies; 0 is plain decoding, None what the
        drafter likes.
      controls: penalties, bias, bans, forced tokens, constraints.
      stop: strings that end the text; they are not part of it.
      ignore_eos: do not stop at the model's end ids.
      chat: see ``encode_prompt``.
      exact: ids identical with speculation on and off.
      width: rows of a pass when exact.
      capacity: tokens the slot may hold.
      draft_params: the drafter's parameters, where it has any and does not bring them.
      passes_per_call: passes between two pieces.

    Yields:
      Text pieces; joined they are the text ``generate`` gives. The generator returns
      the Completion.

    Raises:
      ValueError: the prompt or a setting cannot be served. Raised by the call, not by
        the first piece.
    """
    request = Request(
        prompt_ids=encode_prompt(model, prompt, chat=chat),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_drafts=max_drafts,
        controls=controls,
        stop=_stop_strings(stop),
        ignore_eos=ignore_eos,
    )
    engine = _engine(
        model,
        [request],
        drafter=drafter,
        gamma=gamma,
        rule=rule,
        exact=exact,
        width=width,
        batch_size=1,
        capacity=capacity,
        draft_params=draft_params,
        passes_per_call=passes_per_call,
    )
    engine.submit(request)
    return _pump(engine)


def _pump(engine: Engine) -> Iterator[str]:
    completion = None
    while engine.busy:
        for event in engine.step():
            if event.text:
                yield event.text
            completion = event.completion
    return completion


def _engine(
    model: "Model",
    requests: Sequence[Request],
    *,
    drafter: Drafter | BoundDrafter | str | None,
    gamma: int,
    rule: VerifyRule | str,
    exact: bool,
    width: int | None,
    batch_size: int,
    capacity: int | None,
    draft_params: Params | None,
    passes_per_call: int = PASSES_PER_CALL,
) -> Engine:
    """Makes an engine whose slots hold the longest of some requests."""
    bound, rule = resolve(model, drafter, gamma, rule, draft_params)
    full = bound.drafter.spec.gamma + 1 if width is None else width
    if capacity is None:
        need = max(len(r.prompt_ids) + r.max_new_tokens for r in requests) + full
        capacity = fit_capacity(need, model.target.spec.max_context)
    return Engine(
        model,
        drafter=bound,
        rule=rule,
        batch_size=batch_size,
        capacity=capacity,
        exact=exact,
        width=width,
        passes_per_call=passes_per_call,
        controls=union_spec([r.controls for r in requests]),
        token_masks=union_masks([r.controls for r in requests]),
        n_top=max(r.top_logprobs for r in requests),
    )


def _is_one(prompts: object) -> bool:
    """Tells one prompt from a list of prompts."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    first = prompts[0] if isinstance(prompts, Sequence) and prompts else None
    return isinstance(first, Mapping | int | np.integer)


def _per_prompt(name: str, value, n: int) -> list:
    """Spreads one value over the prompts, or checks that there is one for each."""
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        if len(value) != n:
            raise ValueError(f"{name} has {len(value)} values for {n} prompts.")
        return list(value)
    return [value] * n


def _pieces(model: "Model", ids: Sequence[int]) -> tuple[str, ...]:
    """Returns the text each id adds, for display; held-back text goes to the last."""
    detokenizer = IncrementalDetokenizer(model.need_tokenizer())
    pieces = [detokenizer.push([token]) for token in ids]
    rest = detokenizer.flush()
    if rest and pieces:
        pieces[-1] += rest
    return tuple(pieces)
