"""Command line flags and configuration file of a run."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

from specjax import drafters, verify
from specjax.batch._errors import UsageError
from specjax.batch._main import Files
from specjax.batch._settings import DTYPES, BatchSettings
from specjax.weights import KNOWN_MODELS

_FILES = tuple(field.name for field in dataclasses.fields(Files))
_SETTINGS = tuple(field.name for field in dataclasses.fields(BatchSettings))
# Given as JSON text, or as @ and the path of a file with it.
_JSON = ("logit_bias", "json_schema")


def define_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines a flag for each of ``Files`` and ``BatchSettings``, and ``--config``.

    Args:
      flag_values: where they are defined.
    """
    config_flags.DEFINE_config_file(
        "config",
        None,
        "Python file whose get_config() returns a ConfigDict of these settings; flags "
        "given on the command line win over it.",
        flag_values=flag_values,
    )

    def define(kind: str, name: str, text: str, **options: Any) -> None:
        default = getattr(BatchSettings(), name, None)
        if kind.startswith("multi"):
            default = list(default or ())
        elif name in _JSON:
            default = None
        getattr(flags, f"DEFINE_{kind}")(
            name, default, text, flag_values=flag_values, **options
        )

    _define_run(define)
    _define_sampling(define)


def _define_run(define: Callable[..., None]) -> None:
    """Defines what holds for all records."""
    names = lambda registry: ", ".join(sorted(registry))
    define("string", "prompt", "One prompt, whose text is streamed to stdout.")
    define("string", "prompts", "JSONL file of prompts; needs --output.")
    define("string", "output", "JSONL file that a record is appended to per prompt.")
    define("string", "model", f"Name ({names(KNOWN_MODELS)}), path or hub id.")
    known = drafters.usages()
    define("string", "drafter", f"Drafter: {', '.join(known)}.")
    define("string", "datastore", "File of scripts/build_datastore.py, for suffix.")
    define("string", "draft_model", "Name, path or hub id, for the drafter model.")
    define("string", "draft_dtype", "Type of its parameters; unset: that of --dtype.")
    define("bool", "adaptive", "Draft as much as pays, by acceptance and costs.")
    define(
        "string",
        "costs",
        "File of costs for --adaptive: read, or written where it is not there; unset: "
        "they are measured at each start.",
    )
    define("integer", "gamma", "Draft tokens a pass.")
    define("string", "rule", f"Verify rule: {names(verify.REGISTRY)}.")
    define("integer", "batch_size", "Prompts decoded side by side (--prompts only).")
    define("string", "dtype", f"Type of the parameters: {', '.join(DTYPES)}.")
    define("integer", "capacity", "Tokens a slot holds; unset fits the longest prompt.")
    define("bool", "exact", "Ids identical with speculation on and off.")
    define("bool", "chat", "Use the chat template; unset: where the model has one.")
    define("bool", "ignore_eos", "Do not stop at the model's end tokens.")
    define("bool", "ids", "Write the generated ids (--prompts only).")
    define("bool", "logprobs", "Write log-probabilities of the ids (--prompts only).")
    define(
        "integer",
        "top_logprobs",
        "Write so many most probable ids of each position (--prompts only).",
    )
    define("integer", "n_samples", "Texts a prompt, of seeds counting up (--prompts).")


def _define_sampling(define: Callable[..., None]) -> None:
    """Defines what a record's own settings win over."""
    define("float", "temperature", "0 is greedy.")
    define("integer", "top_k", "Keep the k most probable tokens; 0 is off.")
    define("float", "top_p", "Keep the most probable tokens of this mass; 1 is off.")
    define("float", "min_p", "Least probability relative to the best; 0 is off.")
    define("integer", "seed", "Seed of every prompt's random numbers.")
    define("integer", "max_new_tokens", "Most tokens to generate a turn.")
    define("integer", "min_new_tokens", "No end of a turn before so many tokens.")
    define("multi_string", "stop", "String that ends a text; may be repeated.")
    define("integer", "max_drafts", "Most drafts verified a pass; 0 is plain decoding.")
    define(
        "float",
        "repetition_penalty",
        "Divides logits of tokens in prompt or output, multiplies negative ones; 1 is "
        "off.",
    )
    define(
        "float",
        "presence_penalty",
        "Subtracted from logits of tokens in the output; 0 is off.",
    )
    define(
        "float",
        "frequency_penalty",
        "Subtracted as often as a token is in the output; 0 is off.",
    )
    define(
        "string",
        "logit_bias",
        'Added to the logits of ids: JSON text {"id": bias}, or @FILE with it.',
    )
    define("multi_integer", "banned_ids", "Id never to emit; may be repeated.")
    define("string", "regex", "Expression that a text matches from end to end.")
    define(
        "string",
        "json_schema",
        "Schema of a text that is JSON: JSON text, or @FILE with it.",
    )


def parse_flags(
    argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS
) -> tuple[BatchSettings, Files]:
    """Parses the command line, for ``absl.app.run(main, flags_parser=...)``.

    Args:
      argv: the command line.
      flag_values: flags of ``define_flags``.

    Returns:
      What ``read_flags`` makes of it, which absl hands to ``main``.

    Raises:
      SystemExit: with status 2, after a message, where absl would exit with 1, which
        here means that some records failed.
    """
    try:
        rest = flag_values(argv)
        if "verbosity" in flag_values and not flag_values["verbosity"].present:
            # absl.app would make this INFO, at which JAX lists the backends that are
            # not there.
            flag_values["verbosity"].value = logging.WARNING
            flag_values["verbosity"].using_default_value = False
        if rest[1:]:
            raise UsageError(
                f"{rest[1]!r} is no flag. Give a prompt as --prompt=TEXT (quoted), a "
                "file as --prompts=FILE."
            )
        return read_flags(flag_values)
    # A config file is the user's code and can fail in any way that Python can.
    except Exception as error:
        sys.stderr.write(f"error: {error}\nSee --helpshort for the flags.\n")
        sys.exit(2)


def read_flags(
    flag_values: flags.FlagValues = flags.FLAGS,
) -> tuple[BatchSettings, Files]:
    """Puts defaults, configuration file and flags together, the later winning.

    Args:
      flag_values: parsed flags of ``define_flags``.

    Returns:
      Settings and files.

    Raises:
      UsageError: the configuration has an unknown key, or a value is refused.
    """
    config = flag_values["config"].value
    given: dict[str, Any] = {} if config is None else config.to_dict()
    unknown = sorted(set(given) - {*_FILES, *_SETTINGS})
    if unknown:
        raise UsageError(
            f"--config has the unknown key {unknown[0]!r}; known keys: "
            f"{', '.join(sorted({*_FILES, *_SETTINGS}))}."
        )
    for name in (*_FILES, *_SETTINGS):
        if flag_values[name].present:
            given[name] = flag_values[name].value
    for name in _JSON:
        given[name] = _read_at(name, given.get(name))
    files = {name: given.pop(name) for name in _FILES if name in given}
    return BatchSettings(**given), Files(**files)


def _read_at(name: str, value: Any) -> Any:
    """Returns the text of a file where the value is @ and its path."""
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--{name}={value} cannot be read ({error}): give @ and the path of a "
            "UTF-8 file, or JSON text."
        ) from error
