"""Drafts as long as pays: costs of passes read from a file, or measured and kept."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specjax import bench, drafters
from specjax.batch._errors import UsageError
from specjax.batch._model import resolve_name
from specjax.batch._settings import BatchSettings
from specjax.drafters import BoundDrafter, MeasuredFor, PassCosts

if TYPE_CHECKING:
    from specjax.weights import Model

# Tokens in the cache while passes are timed: half of what a slot holds, as on average,
# but no more than this. Caches of each timed width lie side by side, and what passes
# cost in plain ones hardly changes from here on.
_MOST_CONTEXT = 512


def read_costs(settings: BatchSettings, batch_size: int) -> PassCosts | None:
    """Reads a run's costs, before its model is loaded.

    Args:
      settings: the run's.
      batch_size: rows decoded side by side.

    Returns:
      The costs; None where they are to be measured, or not needed.

    Raises:
      UsageError: the file is of costs of something else, or cannot be read, or could
        not be written.
    """
    if settings.costs is None:
        return None
    path = Path(settings.costs).expanduser()
    if path.is_file():
        try:
            return drafters.load_costs(path, _measured_for(settings, batch_size))
        except (OSError, ValueError) as error:
            raise UsageError(f"--costs={path}: {error}") from error
    if path.exists():
        raise UsageError(f"--costs={path} is no regular file: name one.")
    if not path.parent.is_dir():
        raise UsageError(
            f"--costs={path}: there is no directory {path.parent}; make it first."
        )
    return None


def measure_costs(
    settings: BatchSettings,
    model: "Model",
    draft: BoundDrafter,
    *,
    batch_size: int,
    capacity: int,
) -> PassCosts:
    """Measures a run's costs, and writes them where there is a file for them.

    Args:
      settings: the run's.
      model: the run's.
      draft: its drafter, with its parameters.
      batch_size: rows decoded side by side.
      capacity: tokens that a slot will hold.

    Returns:
      The costs.

    Raises:
      UsageError: they cannot be measured, or the file cannot be written.
    """
    spec = draft.drafter.spec
    n_context = max(1, min(_MOST_CONTEXT, capacity // 2))
    _say(
        f"timing passes of {batch_size} x 1 to {spec.gamma + 1} rows after {n_context} "
        "tokens, and the drafter"
    )
    try:
        costs = bench.measure_costs(
            model,
            draft,
            max_gamma=spec.gamma,
            n_context=n_context,
            batch=batch_size,
            batches=(batch_size,),
        )
    except ValueError as error:
        raise UsageError(f"--adaptive: costs cannot be measured: {error}") from error
    found, plain_pass_s = costs.pass_costs(spec.gamma), costs.one_row_s
    assert plain_pass_s is not None
    kept = ""
    if settings.costs is not None:
        try:
            drafters.save_costs(
                Path(settings.costs).expanduser(),
                found,
                _measured_for(settings, batch_size),
                plain_pass_s=plain_pass_s,
                n_context=n_context,
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"--costs={settings.costs}: {error}") from error
        kept = f" | written to {settings.costs}"
    v = ", ".join(f"{x:.2f}" for x in found.verify)
    _say(f"plain pass {1e3 * plain_pass_s:.3g} ms | c {found.draft:.2g} | v {v}{kept}")
    return found


def make_adaptive(
    settings: BatchSettings, draft: BoundDrafter, costs: PassCosts
) -> BoundDrafter:
    """Makes a run's drafter adaptive."""
    return drafters.adaptive(draft, costs.at_one_width() if settings.exact else costs)


def _measured_for(settings: BatchSettings, batch_size: int) -> MeasuredFor:
    drafter = settings.drafter
    if settings.draft_model is not None:
        name = resolve_name(settings.draft_model)
        drafter += f"({name}, {settings.draft_dtype or settings.dtype})"
    return MeasuredFor(
        model=resolve_name(settings.model),
        drafter=drafter,
        gamma=settings.gamma,
        dtype=settings.dtype,
        batch_size=batch_size,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
