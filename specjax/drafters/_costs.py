"""Files of measured costs, so that what was timed once serves again.

A file is JSON: the costs, in units that their names have, what they were measured for,
and what they were measured with. Whoever loads it says what the costs are for.
"""

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from specjax.drafters._adaptive import PassCosts, check_costs

_FORMAT = 1

_REMEDY = "Measure them anew: remove the file, or name another."


def _platform() -> str:
    return jax.devices()[0].platform


def _device() -> str:
    return jax.devices()[0].device_kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredFor:
    """What costs hold for; those of anything else may be quite others.

    Attributes:
      model: name of the target.
      drafter: name of the drafter, with all that tells it from others: the blocks that
        it leaves out, the draft model.
      gamma: draft tokens a pass.
      dtype: of the target's parameters.
      batch_size: rows decoded side by side.
      platform: of the device, as JAX names it; this process's by default.
      device: its kind, likewise. All CPUs are of one kind: a file of one should not be
        taken to another machine.
    """

    model: str
    drafter: str
    gamma: int
    dtype: str
    batch_size: int = 1
    platform: str = dataclasses.field(default_factory=_platform)
    device: str = dataclasses.field(default_factory=_device)


def save_costs(
    path: str | os.PathLike[str],
    costs: PassCosts,
    measured_for: MeasuredFor,
    *,
    plain_pass_s: float,
    n_context: int,
) -> None:
    """Writes costs as one JSON file, whole or not at all.

    Args:
      path: the file; one that is there is replaced.
      costs: what to write, as ``bench.measure_costs(...).pass_costs(gamma)`` finds it.
      measured_for: what they hold for.
      plain_pass_s: seconds of a plain pass, their unit.
      n_context: tokens in the cache when they were measured. It is noted, as the
        versions of JAX and specjax are, and not compared by ``load_costs``.

    Raises:
      ValueError: a cost is missing, not finite or out of range.
      OSError: it cannot be written.
    """
    check_costs(costs, measured_for.gamma, measured_for.drafter)
    content = {
        "format": _FORMAT,
        "measured_for": dataclasses.asdict(measured_for),
        "measured_with": {
            "n_context": n_context,
            "jax": jax.__version__,
            "specjax": importlib.metadata.version("specjax"),
        },
        "plain_pass_s": float(plain_pass_s),
        "c_plain_passes": float(costs.draft),
        "v_plain_passes": [float(v) for v in costs.verify],
    }
    path = Path(path)
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def load_costs(path: str | os.PathLike[str], measured_for: MeasuredFor) -> PassCosts:
    """Reads what ``save_costs`` wrote, and checks all of it.

    Args:
      path: the file.
      measured_for: what the costs are wanted for.

    Returns:
      The costs.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is broken, of another format, or of costs of something else;
        the message names the file, every difference and the remedy.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no file of costs {path}: measure them with bench.measure_costs "
            "and write them with drafters.save_costs."
        )
    content = _read(path)
    before, now = content["measured_for"], dataclasses.asdict(measured_for)
    names = [name for name in now if before.get(name) != now[name]]
    if names:
        differ = "; ".join(
            f"{name} was {json.dumps(before.get(name))} and is {json.dumps(now[name])}"
            for name in names
        )
        raise ValueError(
            f"{path} holds costs of something else: {differ}. Give the file of what "
            "is run, or name one that is not there yet for costs measured anew."
        )
    costs = PassCosts(content["c_plain_passes"], tuple(content["v_plain_passes"]))
    try:
        check_costs(costs, measured_for.gamma, measured_for.drafter)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error} {_REMEDY}") from error
    return costs


def _read(path: Path) -> Mapping[str, Any]:
    """Reads a file's content, and checks its types."""
    try:
        content = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict) or "format" not in content:
            raise ValueError("it has no key 'format'")
        if content["format"] != _FORMAT:
            raise ValueError(
                f"it is of format {content['format']}; this version reads {_FORMAT}"
            )
        verify = content["v_plain_passes"]
        if not isinstance(content["measured_for"], dict):
            raise ValueError("what it was measured for is no object")
        if not isinstance(verify, list):
            raise ValueError("v_plain_passes is no list")
        for number in (content["c_plain_passes"], *verify):
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"{number!r} is no cost")
    except KeyError as error:
        raise ValueError(f"{path} has no key {error}. {_REMEDY}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read as costs of passes ({error}). {_REMEDY}"
        ) from error
    return content
