"""The settings of a run, checked when they are made."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax import drafters, verify
from specjax.batch._errors import UsageError
from specjax.sampling import check_sampling
from specjax.text import check_settings

#: Settings of a request that decoding takes as they are.
REQUEST = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "max_new_tokens",
    "stop",
    "max_drafts",
)

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

#: Two ways to say what a text must look like, of which a request has one at most.
CONSTRAINTS = ("regex", "json_schema")

#: Settings that a record of the prompt file may have of its own; beside them only
#: ``forced_ids``, which makes no sense for all records.
SAMPLING = (
    *REQUEST,
    *_PENALTIES,
    "logit_bias",
    "banned_ids",
    "min_new_tokens",
    *CONSTRAINTS,
)

DTYPES = ("float32", "bfloat16")

_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What the text of a run depends on, and how it is run.

    Attributes:
      model: a name, path or hub id for ``specjax.load``.
      drafter: name of a drafter.
      datastore: file for the drafter ``suffix``, by ``scripts/build_datastore.py``;
        None is the rows' own text alone.
      draft_model: a name, path or hub id of the model that the drafter ``model`` drafts
        with; its tokens must be the target's.
      draft_dtype: of the draft model's parameters; None is ``dtype``.
      adaptive: draft as much as pays, by each row's acceptance and what passes cost.
      costs: file of those costs, read where it is there and else written after they
        were measured; None measures at each start. It belongs to one model, drafter,
        gamma, dtype, batch size and device.
      gamma: draft tokens a pass.
      rule: name of a verify rule.
      temperature: 0 is greedy. This and those down to ``json_schema``: a record's
        own wins.
      top_k: 0 is off.
      top_p: 1 is off.
      min_p: 0 is off.
      seed: of every record's random numbers.
      max_new_tokens: most ids to generate a turn.
      stop: strings that end a turn's text.
      max_drafts: most drafts that a pass verifies for a record; 0 is plain decoding,
        None what the drafter likes.
      repetition_penalty: divides positive logits of tokens in prompt or output; 1 is
        off.
      presence_penalty: subtracted from logits of tokens in the output; 0 is off.
      frequency_penalty: subtracted as often as a token is in the output; 0 is off.
      logit_bias: id -> what is added to its logit, as a mapping or as JSON text.
      banned_ids: ids that are never emitted.
      min_new_tokens: no end of a turn before this many ids.
      regex: expression that a turn's text matches from end to end. A record's own
        ``regex`` or ``json_schema`` takes the place of both.
      json_schema: schema of the JSON text of a turn, as a mapping or as JSON text.
      batch_size: slots. With ``exact`` the text does not depend on it.
      dtype: of the parameters, ``float32`` or ``bfloat16``.
      capacity: tokens a slot may hold; None fits the longest record.
      exact: ids identical with speculation on and off (rules greedy and coupled).
      chat: put prompts into the chat template; None does so where there is one.
      ignore_eos: do not stop at the model's end ids.
      ids: write the generated ids.
      logprobs: write the log-probability of each generated id.
      top_logprobs: write so many most probable ids of each position, and their
        log-probabilities.
      n_samples: texts a record; sample j (from 0) has the record's seed + j.

    Raises:
      UsageError: a value is of a wrong type or out of range; the message names it.
    """

    model: str = "smollm2-135m-instruct"
    drafter: str = "prompt_lookup"
    datastore: str | None = None
    draft_model: str | None = None
    draft_dtype: str | None = None
    adaptive: bool = False
    costs: str | None = None
    gamma: int = 6
    rule: str = "coupled"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    max_drafts: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | str | None = None
    banned_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    regex: str | None = None
    json_schema: Mapping[str, Any] | str | None = None
    batch_size: int = 4
    dtype: str = "bfloat16"
    capacity: int | None = None
    exact: bool = False
    chat: bool | None = None
    ignore_eos: bool = False
    ids: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    n_samples: int = 1

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
        for name in ("adaptive", "exact", "ignore_eos", "ids", "logprobs"):
            _check_bool(name, getattr(self, name))
        if self.chat is not None:
            _check_bool("chat", self.chat)
        _check_whole("gamma", self.gamma, least=0)
        _check_whole("batch_size", self.batch_size, least=1)
        _check_whole("top_logprobs", self.top_logprobs, least=0)
        _check_whole("n_samples", self.n_samples, least=1)
        if self.capacity is not None:
            _check_whole("capacity", self.capacity, least=1)
        _check_dtype("dtype", self.dtype)
        given = self.sampling
        given["logit_bias"] = _from_json("logit_bias", given["logit_bias"])
        if given["logit_bias"] is None:
            given["logit_bias"] = {}
        given["json_schema"] = _from_json("json_schema", given["json_schema"])
        for name, value in check_sampling_settings(given, "flags").items():
            # Plain types, so that a restart compares equal to what JSON gave back.
            object.__setattr__(self, name, value)
        rule = verify.by_name(self.rule)
        self._check_drafting()
        if rule.greedy_only and self.temperature > 0:
            raise ValueError(
                f"rule {self.rule!r} decodes at temperature 0; got "
                f"temperature={self.temperature}. Use 'coupled' or 'rejection'."
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than "
                f"max_new_tokens={self.max_new_tokens}."
            )

    def _check_drafting(self) -> None:
        for name in ("datastore", "draft_model", "costs"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name} must be a path, got {value!r}.")
        has_draft = self.draft_model is not None
        drafters.check_name(self.drafter, self.gamma, has_draft=has_draft)
        if self.datastore is not None and self.drafter != "suffix":
            raise ValueError(
                "datastore goes with drafter 'suffix'; the drafter is "
                f"{self.drafter!r}."
            )
        if self.draft_dtype is not None:
            if not has_draft:
                raise ValueError(
                    f"draft_dtype={self.draft_dtype!r} is that of a draft model: give "
                    "draft_model, or leave it out."
                )
            _check_dtype("draft_dtype", self.draft_dtype)
        if self.adaptive and self.drafter == "plain":
            raise ValueError(
                "adaptive chooses draft lengths, and drafter 'plain' drafts nothing: "
                "give another drafter, or leave adaptive out."
            )
        if self.adaptive and self.ids_follow_drafts and self.costs is None:
            raise ValueError(
                f"rule {self.rule!r} draws other ids where drafts are of other "
                "lengths, which costs measured at each start would change: give "
                "costs, a file that keeps them, or use rule 'coupled'."
            )
        if self.costs is not None and not self.adaptive:
            raise ValueError(
                f"costs={self.costs!r} are those that adaptive drafting goes by: give "
                "adaptive, or leave costs out."
            )

    @property
    def ids_follow_drafts(self) -> bool:
        """Whether other drafts can give other ids, even of the same law."""
        rule = verify.by_name(self.rule)
        return not rule.lossless or rule.noise == "uniform"

    @property
    def sampling(self) -> dict[str, Any]:
        """The settings that a record may have of its own."""
        return {name: getattr(self, name) for name in SAMPLING}

    def fingerprint(self) -> dict[str, Any]:
        """Returns what must not change between two runs on one output, as JSON."""
        values = dataclasses.asdict(self)
        del values["batch_size"]
        # Costs choose draft lengths, and ids do not depend on those: under exact never,
        # else as little as on the batch size. Measured anew they are never the same,
        # and a run must be able to go on. Where ids do (``ids_follow_drafts``), there
        # is a file of costs, which ``OutputFile.begin`` compares.
        del values["costs"]
        if self.draft_model is not None:
            values["draft_dtype"] = self.draft_dtype or self.dtype
        values["stop"] = list(self.stop)
        values["banned_ids"] = list(self.banned_ids)
        values["logit_bias"] = {str(i): x for i, x in values["logit_bias"].items()}
        if self.json_schema is not None:
            # As text: the order of its properties is that of the output's.
            values["json_schema"] = json.dumps(self.json_schema)
        return values


def check_sampling_settings(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checks sampling settings, also that the device's number types hold them.

    Args:
      settings: any of ``SAMPLING``, and ``forced_ids``.
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
    bias = checked.get("logit_bias", {})
    numbers = {name: checked[name] for name in _PENALTIES if name in checked}
    numbers |= {f"logit_bias[{ident}]": value for ident, value in bias.items()}
    for name, value in numbers.items():
        if value and not _TINY <= abs(value) <= _HUGE:
            raise ValueError(
                f"{where}: {name}={value} is not of a size that float32 holds, "
                f"{_TINY:.3g} to {_HUGE:.3g}"
            )
    return checked


def _from_json(name: str, value: object) -> Any:
    """Returns a setting that may have been given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} {value!r:.60} is not JSON: {error}.") from None


def _check_dtype(name: str, value: object) -> None:
    if value not in DTYPES:
        raise ValueError(f"{name} {value!r} is not known; known: {', '.join(DTYPES)}.")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}.")


def _check_whole(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}.")
