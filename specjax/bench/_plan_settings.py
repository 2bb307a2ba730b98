"""What ``scripts/plan.py`` is asked, checked before anything is measured."""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from specjax import drafters, theory
from specjax.sampling import check_whole

#: One number, or one for each gamma or draft position.
Numbers = float | tuple[float, ...]

MEASURED = "measured"
#: The longest draft considered where nothing has to be measured for it.
_LONGEST = 32
_FORMATS = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What to plan for. All of it is checked when it is made.

    Attributes:
      target: model name, path or hub id.
      drafter: name, as ``drafters.usages`` has them.
      hardware: "measured", this machine, or a name of ``theory.HARDWARE``.
      prompts: JSONL file, its ``category`` the class; None is the built-in set.
      gamma: draft tokens a pass in use.
      max_gamma: the longest draft to consider; None is twice gamma, or as far as
        given numbers go (32 at most) where nothing is measured.
      dtype: of the parameters; None is float32 on this machine, and bfloat16 on a
        device of the table.
      max_new_tokens: tokens to decode for each prompt.
      per_class: prompts of each class.
      rounds: repetitions of what is timed.
      n_context: cached tokens of a sequence, for the cost of passes.
      batches: at which the verify cost is measured, the first 1.
      acceptance: by class, one rate or conditional acceptances by position; None
        measures them.
      cost_ratio: c, or None to measure it (to take it as 0, that of a drafter which
        looks up, with a device of the table).
      verify_cost: v, one number or by gamma from 0 on; None measures it.
      output: file of the plot, or None.
      json: file of all numbers, or None.

    Raises:
      ValueError: a value is not possible; the message names it and the remedy.
      OSError: a file cannot be read or written.
    """

    target: str = "smollm2-135m-instruct"
    drafter: str = "prompt_lookup"
    hardware: str = MEASURED
    prompts: str | None = None
    gamma: int = 6
    max_gamma: int | None = None
    dtype: str | None = None
    max_new_tokens: int = 64
    per_class: int = 4
    rounds: int = 3
    n_context: int = 200
    batches: tuple[int, ...] = (1, 2, 4, 8)
    acceptance: Mapping[str, Numbers] | None = None
    cost_ratio: float | None = None
    verify_cost: Numbers | None = None
    output: str | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        """Checks every value."""
        drafters.check_name(self.drafter, self.gamma)
        if self.drafter == "plain":
            raise ValueError(
                f"drafter {self.drafter!r} proposes nothing, so there is nothing to "
                "plan; choose another."
            )
        drafters.check_gamma(self.gamma)
        for name, least, note in (
            ("max_new_tokens", 2, "tokens to decode for each prompt"),
            ("per_class", 1, "prompts of each class"),
            ("rounds", 1, "repetitions"),
            ("n_context", 1, "cached tokens"),
        ):
            check_whole(name, getattr(self, name), least, 2**31, note)
        if self.max_gamma is not None:
            check_whole("max_gamma", self.max_gamma, self.gamma, 2**10, "from gamma on")
        if self.batches[:1] != (1,) or list(self.batches) != sorted({*self.batches}):
            raise ValueError(f"batches={self.batches} must grow from 1, as 1,2,4,8.")
        self._check_hardware()
        self._check_numbers()
        if self.prompts is not None and not Path(self.prompts).is_file():
            raise FileNotFoundError(
                f"prompts={self.prompts}: there is no such file; give a JSONL file, or "
                "none for the built-in prompts."
            )
        check_output("output", self.output)
        check_output("json", self.json)
        if self.output is not None:
            _check_plot(self.output)

    @property
    def device(self) -> theory.Hardware | None:
        """The device of the table, or None for this machine."""
        return None if self.hardware == MEASURED else theory.get_hardware(self.hardware)

    @property
    def longest(self) -> int:
        """The longest draft to consider."""
        if self.max_gamma is not None:
            return self.max_gamma
        measured = self.acceptance is None
        if self.device is None:
            measured |= self.verify_cost is None
        limits = [2 * self.gamma if measured else max(_LONGEST, self.gamma)]
        lists = [a for a in (self.acceptance or {}).values() if isinstance(a, tuple)]
        limits += map(len, lists)
        if isinstance(self.verify_cost, tuple):
            limits.append(len(self.verify_cost) - 1)
        return min(limits)

    def _check_hardware(self) -> None:
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be float32 or bfloat16.")
        if self.hardware == MEASURED:
            return
        try:
            theory.get_hardware(self.hardware)
        except ValueError:
            raise ValueError(
                f"hardware {self.hardware!r} is unknown; use {MEASURED} for this "
                f"machine, or one of {', '.join(theory.HARDWARE)}."
            ) from None
        if self.acceptance is None:
            raise ValueError(
                f"hardware={self.hardware!r} measures nothing, so acceptance must be "
                "given: one rate as 0.7, or by position as 0.8,0.7,0.6. It does not "
                f"depend on the device: hardware={MEASURED} measures it."
            )
        if self.verify_cost is not None:
            raise ValueError(
                f"verify_cost={self.verify_cost} cannot be given with hardware="
                f"{self.hardware!r}, whose roofline predicts it; leave it out."
            )

    def _check_numbers(self) -> None:
        """Checks that lists are long enough, and lets the theory check the rest."""
        need = self.max_gamma or self.gamma
        for name, given in (self.acceptance or {}).items():
            if isinstance(given, tuple) and len(given) < need:
                raise ValueError(
                    f"acceptance of {name!r} has {len(given)} positions, and drafts of "
                    f"{need} tokens are asked for; give as many, or one rate."
                )
            theory.speedup_curve(given, 0.0, max_gamma=1)
        v = self.verify_cost
        if isinstance(v, tuple) and len(v) <= need:
            raise ValueError(
                f"verify_cost has {len(v)} entries, and drafts of {need} tokens need "
                f"{need + 1}, from gamma 0 on; give as many, or one number."
            )
        every = np.arange(len(v)) if isinstance(v, tuple) else self.gamma
        theory.speedup(0.5, every, self.cost_ratio or 0.0, 1.0 if v is None else v)


def parse_numbers(name: str, text: str) -> Numbers:
    """Reads one number, or several with commas between them.

    Args:
      name: of the flag, for the message.
      text: what was given.

    Returns:
      A number, or a tuple of them where there is a comma.

    Raises:
      ValueError: it is something else.
    """
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"{name}={text!r} must be one number, as 0.7, or several, as 0.8,0.7,0.6."
        ) from None
    return numbers if "," in text else numbers[0]


def parse_batches(texts: Sequence[str]) -> tuple[int, ...]:
    """Reads batches.

    Args:
      texts: whole numbers.

    Returns:
      The numbers.

    Raises:
      ValueError: one is something else.
    """
    try:
        return tuple(int(text) for text in texts)
    except ValueError:
        raise ValueError(f"batches={list(texts)} must be whole numbers.") from None


def parse_acceptance(texts: Sequence[str]) -> dict[str, Numbers] | None:
    """Reads acceptances, each of a class: "0.7", "chat=0.3", "code=0.5,0.4,0.4".

    Args:
      texts: one a class; the name may be left out.

    Returns:
      Numbers by class, or None where there are no texts.

    Raises:
      ValueError: a text is something else, or a class comes twice.
    """
    classes: dict[str, Numbers] = {}
    for text in texts:
        name, _, numbers = text.rpartition("=")
        name = name or "given"
        if name in classes:
            raise ValueError(
                f"acceptance of {name!r} is given twice; name classes, as chat=0.3."
            )
        classes[name] = parse_numbers("acceptance", numbers)
    return classes or None


def positions(acceptance: Numbers, n: int) -> tuple[float, ...]:
    """Gives acceptances of n positions; 0 beyond a list, where nothing ever got."""
    if not isinstance(acceptance, tuple):
        return (acceptance,) * n
    return (*acceptance[:n], *(0.0,) * (n - len(acceptance)))


def check_output(name: str, file: str | None) -> None:
    """Checks that a file can be written, without touching it.

    Args:
      name: of the flag, for the message.
      file: the file, or None for none.

    Raises:
      OSError: it cannot be written.
    """
    if file is None:
        return
    path = Path(file)
    if path.is_dir():
        raise IsADirectoryError(f"{name}={file} is a directory; give a file.")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{name}={file} cannot be written: there is no directory {path.parent}; "
            "make it first."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(
            f"{name}={file} cannot be written: it is protected; give another place."
        )


def _check_plot(file: str) -> None:
    if Path(file).suffix not in _FORMATS:
        raise ValueError(f"output={file} must end in {', '.join(_FORMATS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"output={file} needs matplotlib, which is not installed: "
            "`pip install matplotlib`, or leave the plot out."
        )
