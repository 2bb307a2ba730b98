"""The settings of a run, checked when they are made."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax import drafters, verify
from specjax.batch._errors import UsageError
from specjax.sampling import check_sampling
from specjax.text import check_settings

#: Settings that a record of the prompt file may have of its own.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "stop")

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What the text of a run depends on, and how it is run.

    Attributes:
      model: a name, path or hub id for ``specjax.load``.
      drafter: name of a drafter.
      gamma: draft tokens a pass.
      rule: name of a verify rule.
      temperature: 0 is greedy. This and the next six: a record's own wins.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      seed: of every record's random numbers.
      max_new_tokens: most ids to generate a turn.
      stop: strings that end a turn's text.
      batch_size: slots. With ``exact`` the text does not depend on it.
      dtype: of the parameters, ``float32`` or ``bfloat16``.
      capacity: tokens a slot may hold; None fits the longest record.
      exact: ids identical with speculation on and off (rules greedy and coupled).
      chat: put prompts into the chat template; None does so where there is one.
      ignore_eos: do not stop at the model's end ids.
      ids: write the generated ids.
      logprobs: write the log-probability of each generated id.

    Raises:
      UsageError: a value is of a wrong type or out of range; the message names it.
    """

    model: str = "smollm2-135m-instruct"
    drafter: str = "prompt_lookup"
    gamma: int = 6
    rule: str = "coupled"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    batch_size: int = 4
    dtype: str = "bfloat16"
    capacity: int | None = None
    exact: bool = False
    chat: bool | None = None
    ignore_eos: bool = False
    ids: bool = True
    logprobs: bool = False

    def __post_init__(self) -> None:
        """Checks every value."""
        try:
            self._check()
        except ValueError as error:
            raise UsageError(str(error)) from error

    def _check(self) -> None:
        for name in ("model", "drafter", "rule", "dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a name, got {value!r}.")
        for name in ("exact", "ignore_eos", "ids", "logprobs"):
            _check_bool(name, getattr(self, name))
        if self.chat is not None:
            _check_bool("chat", self.chat)
        _check_whole("gamma", self.gamma, least=0)
        _check_whole("batch_size", self.batch_size, least=1)
        if self.capacity is not None:
            _check_whole("capacity", self.capacity, least=1)
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype {self.dtype!r} is not known; known: {', '.join(DTYPES)}."
            )
        given = {name: getattr(self, name) for name in SAMPLING}
        for name, value in check_sampling_settings(given, "flags").items():
            # Plain types, so that a restart compares equal to what JSON gave back.
            object.__setattr__(self, name, value)
        drafters.by_name(self.drafter, self.gamma)
        rule = verify.by_name(self.rule)
        if rule.greedy_only and self.temperature > 0:
            raise ValueError(
                f"rule {self.rule!r} decodes at temperature 0; got "
                f"temperature={self.temperature}. Use 'coupled' or 'rejection'."
            )

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings that a record may have of its own."""
        return {name: getattr(self, name) for name in SAMPLING}

    def fingerprint(self) -> dict[str, Any]:
        """Returns what must not change between two runs on one output, as JSON."""
        values = dataclasses.asdict(self)
        del values["batch_size"]
        values["stop"] = list(self.stop)
        return values


def check_sampling_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checks sampling settings, also that the device's number types hold them.

    Args:
      settings: any of ``SAMPLING``.
      where: where they come from, for the message.

    Returns:
      The same with plain Python values.

    Raises:
      ValueError: a setting is unknown, of a wrong type or out of range.
    """
    checked = check_settings(settings, where)
    try:
        check_sampling(
            checked.get("temperature", 0.0),
            checked.get("top_k", 0),
            checked.get("top_p", 1.0),
            checked.get("min_p", 0.0),
            checked.get("seed", 0),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return checked


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}.")


def _check_whole(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}.")
