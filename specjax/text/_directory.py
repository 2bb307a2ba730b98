"""What the JSON files next to a ``tokenizer.json`` say about it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers


@dataclasses.dataclass(frozen=True)
class Roles:
    """Tokens with a role, and the chat template.

    Attributes:
      bos: id that starts a text, or None.
      eos: id of the one end token that templates print, or None.
      eos_ids: every id that ends a text, without repeats.
      pad: id that fills a batch, or None.
      chat_template: Jinja source, or None.
    """

    bos: int | None = None
    eos: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad: int | None = None
    chat_template: str | None = None


def read_directory(path: Path) -> tuple[tokenizers.Tokenizer, Roles]:
    """Reads a tokenizer and the roles of its tokens from a model's directory.

    Args:
      path: directory that holds ``tokenizer.json``.

    Returns:
      The tokenizer, with truncation and padding off, and the roles.

    Raises:
      FileNotFoundError: there is no ``tokenizer.json``.
      ValueError: a file is malformed, or names a token that does not exist.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"no tokenizer.json in {path}: give the model's directory; a slow "
            "tokenizer (tokenizer.model, vocab.json) must first be saved as "
            "tokenizer.json"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from error
    # A file may ask for both; text is never cut or filled here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    _add_missing_tokens(tokenizer, config, path / "tokenizer_config.json")
    special = _read_json(path / "special_tokens_map.json")
    generation = _read_json(path / "generation_config.json")
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "pad"):
        ids[name] = _role(tokenizer, path, name, config, special, generation)
    saved = config.get("eos_token_id")
    if saved is not None:
        eos_ids = _id_list(tokenizer, saved, path / "tokenizer_config.json")
    else:
        file = path / "generation_config.json"
        eos_ids = _id_list(tokenizer, generation.get("eos_token_id"), file)
        eos_ids += () if ids["eos"] is None else (ids["eos"],)
    roles = Roles(
        bos=ids["bos"],
        eos=ids["eos"],
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        pad=ids["pad"],
        chat_template=_chat_template(path, config),
    )
    return tokenizer, roles


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{file} must hold a JSON object, got {type(content).__name__}"
        )
    return content


def _token_text(value: Any, file: str) -> str:
    """A token given as a string or as an AddedToken's fields."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise ValueError(
            f"{file}: a token must be a string or an object with a string 'content', "
            f"got {value!r}"
        )
    return text


def _add_missing_tokens(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path
) -> None:
    """Adds what only ``added_tokens_decoder`` lists, under the ids it gives."""
    decoder = config.get("added_tokens_decoder", {})
    if not isinstance(decoder, Mapping):
        raise ValueError(f"{file}: added_tokens_decoder must be an object")
    known = tokenizer.get_added_tokens_decoder()
    for key in sorted(decoder, key=lambda key: int(key) if key.isdecimal() else -1):
        entry = decoder[key]
        text = _token_text(entry, str(file))
        if not key.isdecimal():
            raise ValueError(f"{file}: added_tokens_decoder has the key {key!r}")
        if int(key) not in known:
            special = bool(entry.get("special")) if isinstance(entry, dict) else False
            options = {
                name: bool(entry[name])
                for name in ("single_word", "lstrip", "rstrip", "normalized")
                if isinstance(entry, dict) and name in entry
            }
            token = tokenizers.AddedToken(text, special=special, **options)
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(text) != int(key):
            raise ValueError(
                f"{file} gives {text!r} the id {key}, but in tokenizer.json it is "
                f"{tokenizer.token_to_id(text)}: the two files are not of one model"
            )


def _role(
    tokenizer: tokenizers.Tokenizer,
    path: Path,
    name: str,
    config: Mapping[str, Any],
    special: Mapping[str, Any],
    generation: Mapping[str, Any],
) -> int | None:
    """The id of a role's one token; a written null means that there is none."""
    key = f"{name}_token"
    sources = (("tokenizer_config.json", config), ("special_tokens_map.json", special))
    for file, content in sources:
        if key not in content:
            continue
        if content[key] is None:
            return None
        text = _token_text(content[key], f"{path / file}: {key}")
        ident = tokenizer.token_to_id(text)
        if ident is None:
            raise ValueError(
                f"{path / file} names {text!r} as {key}, but tokenizer.json has no "
                "such token: correct the name or add the token"
            )
        return ident
    file = path / "generation_config.json"
    ids = _id_list(tokenizer, generation.get(f"{key}_id"), file)
    return ids[0] if ids else None


def _id_list(
    tokenizer: tokenizers.Tokenizer, value: Any, file: Path
) -> tuple[int, ...]:
    """Ids given as null, as one number or as a list of numbers."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for ident in ids:
        is_id = isinstance(ident, int) and not isinstance(ident, bool) and ident >= 0
        if not is_id or tokenizer.id_to_token(ident) is None:
            raise ValueError(
                f"{file} names the id {ident!r}, but tokenizer.json has no such id: "
                "the two files are not of one model"
            )
    return tuple(ids)


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The template; a file of its own is preferred to an entry of the config."""
    jinja = path / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text("utf-8")
    for file in ("chat_template.json", "tokenizer_config.json"):
        content = config if file == "tokenizer_config.json" else _read_json(path / file)
        template = content.get("chat_template")
        if isinstance(template, list):
            named = {
                entry.get("name"): entry.get("template")
                for entry in template
                if isinstance(entry, Mapping)
            }
            if "default" not in named:
                raise ValueError(
                    f"{path / file}: none of the chat templates is named 'default'; "
                    f"found {sorted(map(str, named))}"
                )
            template = named["default"]
        if template is not None and not isinstance(template, str):
            raise ValueError(
                f"{path / file}: chat_template must be a string, got "
                f"{type(template).__name__}"
            )
        if template is not None:
            return template
    return None
