"""Chat messages in the text format of a policy: its own chat template, rendered in a sandbox.

- The template is a file of the policy, `chat_template.jinja` or a key of `tokenizer_config.json`. The maker of the
  policy wrote it, so it runs in a sandbox that can access its arguments only.
- The rendered text ends where the policy's answer begins.
- A turn of an episode is never rendered again: only what the template puts after it, with what the policy reads next,
  is added to its tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.config import DataSection
from protocol.errors import ConfigInvalid, ManifestInvalid
from protocol.tasks import ChatMessage

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Chat:
    """The additions of a round to the messages of its prompts."""

    system_prompt: str = ""
    """The system message, which is added to messages without one."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values for the template, such as `enable_thinking` or `tools`."""

    @classmethod
    def from_config(cls, data: DataSection) -> "Chat":
        """Return the additions in the operator's file."""
        return cls(data.system_prompt, data.template_arguments)


PLAIN_CHAT = Chat()

_SAID, _TURN = "\ufdd0said\ufdd0", "\ufdd0turn\ufdd0"


class ChatTemplate:
    """The chat template of a policy, which is read when the first messages are rendered."""

    def __init__(self, read_file: Callable[[str], bytes], chat: Chat = PLAIN_CHAT) -> None:
        self._read_file = read_file
        self._chat = chat
        self._compiled: Any = None
        self._special: dict[str, str] = {}

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Any] = ()) -> str:
        """Return the messages as text that ends where the policy's answer begins; `tools` are JSON schemas."""
        return self.render_fields([message._asdict() for message in messages], tools)

    def render_fields(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        """Return messages with further fields, such as calls of tools, in the same form."""
        if self._compiled is None:
            self._compile()
        if self._chat.system_prompt and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self._chat.system_prompt}, *messages)
        given = {"tools": list(tools) or None, "documents": None, **self._special, **self._chat.arguments}
        try:
            text: str = self._compiled.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **given
            )
        except Exception as error:  # a template is a third party's program, and may fail in any way
            raise ConfigInvalid(
                f"The policy's chat template refuses these messages: {str(error)[:200]}.",
                hint="Check that the roles alternate as the template requires. Some templates accept no system prompt.",
            ) from error
        return text

    def after_turn(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        """Return the text from the end of a turn, its end token included, to the begin of the next turn.

        The turn itself is a word that is in no template: its text does not matter.
        """
        before = [{"role": "user", "content": _SAID}, {"role": "assistant", "content": _TURN}]
        text = self.render_fields([*before, *messages], tools)
        if text.count(_TURN) != 1:
            raise ConfigInvalid(
                "The policy's chat template does not show a turn once.", hint="Use prompts in plain text."
            )
        return text.partition(_TURN)[2]

    def _compile(self) -> None:
        try:
            from jinja2 import TemplateSyntaxError

            from coordinator.tasks.jinja_environment import compiled
        except ModuleNotFoundError:
            raise ConfigInvalid("Chat prompts need jinja2.", hint="pip install 'echo-swarm[data]'") from None
        settings = self._settings()
        source = self._file("chat_template.jinja")
        template = source.decode() if source is not None else _named(settings.get("chat_template"))
        if not template:
            raise ConfigInvalid(
                "The prompts are chat messages, and the policy has no chat template.",
                hint="Use an instruct model, or prompts in plain text.",
            )
        self._special = {name: _token(settings[name]) for name in SPECIAL if settings.get(name)}
        try:
            self._compiled = compiled(template)
        except TemplateSyntaxError as error:
            raise ConfigInvalid(f"The policy's chat template is not valid Jinja: {error}.") from error

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(self._file("tokenizer_config.json") or b"{}")
        return settings

    def _file(self, name: str) -> bytes | None:
        try:
            return self._read_file(name)
        except (ManifestInvalid, FileNotFoundError, KeyError):
            return None


def _named(template: Any) -> str:
    """Return the template; of several named ones, the default."""
    if isinstance(template, list):
        return next((str(each["template"]) for each in template if each.get("name") == "default"), "")
    return str(template or "")


def _token(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)
