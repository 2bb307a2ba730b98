"""Chat templates, rendered in a sandbox."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from specjax.text._tokenizer import Tokenizer, check_text


class _Generation(jinja2.ext.Extension):
    """Lets ``{% generation %}`` through: it only marks text for training."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which is not what models were trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class ChatTemplate:
    """A model's chat template: messages in, prompt text out.

    Templates come with model files and are untrusted code, so they run in
    Jinja's immutable sandbox. They get what published templates rely on:
    ``raise_exception``, ``strftime_now``, ``tojson`` without HTML escapes, loop
    controls, and ``{% generation %}`` blocks, which change nothing.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ):
        """Compiles a template.

        Args:
          source: Jinja source.
          bos_token: what ``bos_token`` prints; undefined where None.
          eos_token: what ``eos_token`` prints; undefined where None.
          pad_token: what ``pad_token`` prints; undefined where None.
          now: the clock behind ``strftime_now``.

        Raises:
          TypeError: `source` is not a string.
          ValueError: `source` is not a Jinja template.
        """
        check_text(source, "a chat template")
        tokens = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "pad_token": pad_token,
        }
        self._tokens = {name: text for name, text in tokens.items() if text is not None}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid Jinja (line {error.lineno}): "
                f"{error.message}"
            ) from error

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """The chat template that came with a tokenizer.

        Args:
          tokenizer: the tokenizer.

        Returns:
          The template, with the tokenizer's BOS, EOS and PAD tokens.

        Raises:
          ValueError: the tokenizer has no chat template, or one that is not valid.
        """
        if tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: give plain prompts, or make one "
                "with ChatTemplate(source, ...)"
            )
        return cls(
            tokenizer.chat_template,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Renders a conversation.

        The text holds the special tokens that the model expects, so encode it
        with ``add_special_tokens=False``.

        Args:
          messages: mappings with a ``role`` and a ``content``, both strings; other
            keys are passed on.
          add_generation_prompt: end with the header of the model's next turn.
          **extra: more variables for the template, such as ``tools``.

        Returns:
          The prompt.

        Raises:
          ValueError: the messages are malformed, or the template fails or refuses
            them; its own message is given.
        """
        _check_messages(messages)
        variables = {"tools": None, "documents": None, **self._tokens, **extra}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        # A template is foreign code and can fail in any way that Python can.
        except Exception as error:
            kind = "" if type(error) is jinja2.TemplateError else type(error).__name__
            raise ValueError(
                f"the chat template failed: {kind}{': ' if kind else ''}{error}"
            ) from error


def _check_messages(messages: Any) -> None:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(
        messages, Sequence
    ):
        raise ValueError(
            "messages must be a list of {'role': ..., 'content': ...}, got "
            f"{type(messages).__name__}"
        )
    if not messages:
        raise ValueError("messages is empty: give at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"messages[{i}] must be {{'role': ..., 'content': ...}}, got "
                f"{type(message).__name__}"
            )
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(
                    f"messages[{i}] has no {key!r}; its keys are "
                    f"{sorted(map(str, message))}"
                )
            if not isinstance(message[key], str):
                raise ValueError(
                    f"messages[{i}][{key!r}] must be a string, got "
                    f"{type(message[key]).__name__}: only text is supported"
                )
        if not message["role"]:
            raise ValueError(f"messages[{i}]['role'] is empty: use 'user' or the like")
