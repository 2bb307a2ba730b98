"""Loads a run's model and drafter and checks the settings that depend on them."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from specjax import decode, drafters, verify
from specjax.batch._errors import UsageError
from specjax.batch._settings import BatchSettings
from specjax.drafters import BoundDrafter, load_datastore
from specjax.trees import Topology
from specjax.typing import Params
from specjax.weights import KNOWN_MODELS, load

if TYPE_CHECKING:
    from specjax.weights import Model


def resolve_name(name: str) -> str:
    """Returns a model's name, the same from whatever directory a path is given."""
    path = Path(name).expanduser()
    here = name not in KNOWN_MODELS and path.exists()
    return str(path.resolve()) if here else name


def load_model(settings: BatchSettings) -> "Model":
    """Loads the model of a run.

    Args:
      settings: the run's.

    Returns:
      The model, which has a tokenizer.

    Raises:
      UsageError: it cannot be loaded, or does not go with the settings.
    """
    decode.enable_compilation_cache()
    model = _load("model", settings.model, settings.dtype)
    if model.tokenizer is None:
        raise UsageError(
            f"--model={settings.model} was saved without a tokenizer, which text needs."
        )
    if settings.chat and model.chat_template is None:
        raise UsageError(
            f"{model.name} has no chat template; leave --chat out or give --nochat."
        )
    vocab_size = model.target.spec.vocab_size
    if settings.top_logprobs > vocab_size:
        raise UsageError(
            f"--top_logprobs={settings.top_logprobs} is more than the {vocab_size} ids "
            f"of {model.name}; lower it."
        )
    context = model.target.spec.max_context
    if settings.capacity is not None and settings.capacity > context:
        raise UsageError(
            f"--capacity={settings.capacity} is more than the {context} positions "
            f"that {model.name} is made for; lower it."
        )
    return model


def load_drafter(settings: BatchSettings, model: "Model") -> BoundDrafter:
    """Makes the drafter of a run, with its datastore or draft model.

    Args:
      settings: the run's.
      model: the run's.

    Returns:
      The drafter, not adaptive yet, if it can be.

    Raises:
      UsageError: what it needs cannot be loaded, or does not go with the model.
    """
    draft = _make_drafter(settings, model)
    if settings.adaptive:
        try:
            drafters.check_chain(draft.drafter)
        except ValueError as error:
            raise UsageError(f"--adaptive: {error}") from error
    return draft


def _make_drafter(settings: BatchSettings, model: "Model") -> BoundDrafter:
    if settings.draft_model is None:
        store = _load_store(settings, model)
        try:
            draft, _ = decode.resolve(
                model, settings.drafter, settings.gamma, settings.rule, store
            )
        except ValueError as error:
            raise UsageError(f"--drafter={settings.drafter}: {error}") from error
        return draft
    dtype = settings.draft_dtype or settings.dtype
    small = _load("draft_model", settings.draft_model, dtype)
    try:
        shape = drafters.draft_shape(settings.drafter, settings.gamma)
        return drafters.from_model(
            model, small, shape, draws=_siblings(settings.rule, shape)
        )
    except ValueError as error:
        raise UsageError(f"--draft_model={settings.draft_model}: {error}") from error


def _siblings(rule: str, shape: int | Topology) -> drafters.Draws:
    """Returns how a draft model draws for a rule."""
    apart = verify.by_name(rule).siblings == "without_replacement"
    return "without_replacement" if apart and isinstance(shape, Topology) else "sample"


def _load(flag: str, name: str, dtype: str) -> "Model":
    try:
        return load(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UsageError(f"--{flag}={name}: {error}") from error


def _load_store(settings: BatchSettings, model: "Model") -> Params | None:
    """Loads the datastore; None where the run has none."""
    if settings.datastore is None:
        return None
    meaning = model.need_tokenizer().fingerprint()
    try:
        store = load_datastore(settings.datastore, fingerprint=meaning)
    except (OSError, ValueError) as error:
        raise UsageError(f"--datastore={settings.datastore}: {error}") from error
    return cast(Params, store)
