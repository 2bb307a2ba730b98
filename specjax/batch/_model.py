"""Loads a run's model and checks the settings that depend on it."""

from typing import TYPE_CHECKING, cast

from specjax import decode
from specjax.batch._errors import UsageError
from specjax.batch._settings import BatchSettings
from specjax.drafters import load_datastore
from specjax.typing import Params
from specjax.weights import load

if TYPE_CHECKING:
    from specjax.weights import Model


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
    try:
        model = load(settings.model, dtype=settings.dtype)
    except (OSError, ValueError) as error:
        raise UsageError(f"--model={settings.model}: {error}") from error
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


def load_draft_params(settings: BatchSettings, model: "Model") -> Params | None:
    """Loads the parameters of a run's drafter.

    Args:
      settings: the run's.
      model: the run's.

    Returns:
      The datastore, or None where the drafter has no parameters.

    Raises:
      UsageError: it cannot be loaded, or does not go with the model's tokenizer.
    """
    if settings.datastore is None:
        return None
    meaning = model.need_tokenizer().fingerprint()
    try:
        store = load_datastore(settings.datastore, fingerprint=meaning)
    except (OSError, ValueError) as error:
        raise UsageError(f"--datastore={settings.datastore}: {error}") from error
    return cast(Params, store)
