"""One prompt, its text streamed."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from specjax.batch._constraints import Constraints
from specjax.batch._costs import make_adaptive, measure_costs, read_costs
from specjax.batch._errors import UsageError
from specjax.batch._model import load_drafter, load_model
from specjax.batch._progress import stats_text
from specjax.batch._settings import REQUEST, BatchSettings
from specjax.decode import Completion, Controls, encode_prompt, fit_capacity, stream
from specjax.drafters import BoundDrafter, PassCosts

if TYPE_CHECKING:
    from specjax.weights import Model


def run_prompt(
    settings: BatchSettings,
    prompt: str,
    *,
    out: TextIO | None = None,
    notes: TextIO | None = None,
) -> bool:
    """Prints the text for one prompt as it comes, then a line of statistics.

    Args:
      settings: the run's; ``batch_size``, ``n_samples``, ``ids``, ``logprobs`` and
        ``top_logprobs`` play no part.
      prompt: the prompt.
      out: takes the text; None is stdout.
      notes: takes the statistics, so that the text alone can be piped on; None is
        stderr.

    Returns:
      Whether it went well; if not, the error was printed instead of statistics.

    Raises:
      UsageError: the model, the prompt or a setting is refused.
    """
    to: TextIO = sys.stdout if out is None else out
    notes = sys.stderr if notes is None else notes
    costs = read_costs(settings, 1)
    model = load_model(settings)
    draft = load_drafter(settings, model)
    if settings.adaptive:
        draft = _adapt(settings, model, draft, costs, prompt)
    began = time.perf_counter()
    sampling = settings.sampling
    controls = _controls(settings, model)
    try:
        pieces = stream(
            model,
            prompt,
            drafter=draft,
            rule=settings.rule,
            chat=settings.chat,
            exact=settings.exact,
            capacity=settings.capacity,
            ignore_eos=settings.ignore_eos,
            controls=controls,
            **{name: sampling[name] for name in REQUEST},
        )
    except ValueError as error:
        raise UsageError(f"--prompt: {error}") from error
    completion, first = _print(pieces, to, began)
    seconds = time.perf_counter() - began
    if completion.error is not None:
        print(f"error: {completion.error}", file=notes)
        return False
    print(
        stats_text(completion.stats, len(completion.ids), seconds)
        + ("" if first is None else f" | first text after {first:.2f} s"),
        file=notes,
    )
    return True


def _controls(settings: BatchSettings, model: "Model") -> Controls:
    try:
        constraints = Constraints(model, ignore_eos=settings.ignore_eos)
        return constraints.controls(settings.sampling)
    except ValueError as error:
        raise UsageError(f"flags: {error}") from error


def _print(
    pieces: Iterator[str], to: TextIO, began: float
) -> tuple[Completion, float | None]:
    """Writes text as it comes; returns all of it and the seconds until the first."""
    first = None
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            completion: Completion = end.value
            break
        if first is None:
            first = time.perf_counter() - began
        to.write(piece)
        to.flush()
    if not completion.text.endswith("\n"):
        to.write("\n")
        to.flush()
    return completion, first


def _adapt(
    settings: BatchSettings,
    model: "Model",
    draft: BoundDrafter,
    costs: PassCosts | None,
    prompt: str,
) -> BoundDrafter:
    """Makes the drafter adaptive, measuring costs where there are none yet."""
    if costs is None:
        n_prompt = len(encode_prompt(model, prompt, chat=settings.chat))
        need = n_prompt + settings.max_new_tokens + settings.gamma + 1
        context = model.target.spec.max_context
        capacity = settings.capacity or fit_capacity(need, context)
        costs = measure_costs(settings, model, draft, batch_size=1, capacity=capacity)
    return make_adaptive(settings, draft, costs)
