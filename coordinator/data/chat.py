"""Chat messages as the text that a policy was taught to see: its own chat template, rendered in a sandbox.

- The template is a file of the policy, `chat_template.jinja` or a key of `tokenizer_config.json`. Whoever made the
  policy wrote it, so it runs where it reaches nothing but what it is given.
- It ends where the policy's answer begins.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from protocol.errors import ConfigInvalid, ManifestInvalid
from protocol.tasks import ChatMessage

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A policy's template; read when the first messages are to be rendered."""

    def __init__(self, read_file: Callable[[str], bytes]) -> None:
        self._read_file = read_file
        self._compiled: Any = None
        self._special: dict[str, str] = {}

    def render(self, messages: Sequence[ChatMessage]) -> str:
        from jinja2 import TemplateError

        if self._compiled is None:
            self._compile()
        told = [message._asdict() for message in messages]
        try:
            text: str = self._compiled.render(messages=told, add_generation_prompt=True, **self._special)
        except (TemplateError, ArithmeticError, TypeError, ValueError) as error:
            raise ConfigInvalid(
                f"The policy's chat template refuses these messages: {str(error)[:200]}.",
                hint="Do their roles alternate as it wants?",
            ) from error
        return text

    def _compile(self) -> None:
        try:
            from jinja2 import TemplateSyntaxError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise ConfigInvalid("Chat prompts need jinja2.", hint="pip install 'echo-swarm[data]'") from None
        settings = self._settings()
        source = self._file("chat_template.jinja")
        template = source.decode() if source is not None else _named(settings.get("chat_template"))
        if not template:
            raise ConfigInvalid(
                "The prompts are chat messages, and the policy has no chat template.",
                hint="Take an instruct model, or prompts that are plain text.",
            )
        self._special = {name: _token(settings[name]) for name in SPECIAL if settings.get(name)}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        try:
            self._compiled = environment.from_string(template)
        except TemplateSyntaxError as error:
            raise ConfigInvalid(f"The policy's chat template is no Jinja: {error}.") from error

    def _settings(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._file("tokenizer_config.json") or b"{}")
        return found

    def _file(self, name: str) -> bytes | None:
        try:
            return self._read_file(name)
        except (ManifestInvalid, FileNotFoundError, KeyError):
            return None


def _named(template: Any) -> str:
    """Some policies have several by name."""
    if isinstance(template, list):
        return next((str(each["template"]) for each in template if each.get("name") == "default"), "")
    return str(template or "")


def _token(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def _refuse(message: str) -> None:
    raise ValueError(message)
