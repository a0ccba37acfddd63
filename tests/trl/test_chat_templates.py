"""TRL's chat templates, those of 30 families of models, as transformers renders them and as the coordinator does."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from coordinator.tasks.chat import Chat, ChatTemplate
from coordinator.tasks.jinja_environment import strftime_now
from protocol.errors import ConfigInvalid
from protocol.tasks import ChatMessage

spec = find_spec("trl")
if spec is None or not spec.submodule_search_locations:
    pytest.skip("TRL is not installed here; `make test-trl` has it", allow_module_level=True)
TEMPLATES = sorted((Path(spec.submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))

SYSTEM, USER, ANSWER = ChatMessage("system", "Add."), ChatMessage("user", "1 + 1"), ChatMessage("assistant", "2")
CONVERSATIONS = {
    "one question": (USER,),
    "a system prompt": (SYSTEM, USER),
    "a second question": (USER, ANSWER, ChatMessage("user", "<b>2 + 2</b>")),
    "thoughts": (USER, ChatMessage("assistant", "<think>\nOne and one.\n</think>\n\n2"), USER),
    "a wrong order": (ANSWER, SYSTEM),
}

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds <two> numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number", "description": "the first"}},
            "required": ["a"],
        },
    },
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no thoughts": {"enable_thinking": False},
    "thoughts": {"enable_thinking": True, "reasoning_effort": "high"},
    "tools": {"tools": [TOOL]},
}

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def as_in_transformers(template: str, messages: tuple[ChatMessage, ...], arguments: dict[str, Any]) -> str | None:
    """Return the text, or None where the template fails."""
    given = {"tools": None, "documents": None, "strftime_now": strftime_now, **TOKENS, **arguments}
    try:
        text: str = _compile_jinja_template(template).render(
            messages=[message._asdict() for message in messages], add_generation_prompt=True, **given
        )
    except Exception:  # a template may fail in any way
        return None
    return text


def as_here(template: str, messages: tuple[ChatMessage, ...], arguments: dict[str, Any]) -> str | None:
    """Return the text, or None where the template is refused."""
    files = {
        "chat_template.jinja": template.encode(),
        "tokenizer_config.json": b'{"bos_token": "<s>", "eos_token": "</s>"}',
    }
    try:
        return ChatTemplate(files.__getitem__, Chat(arguments=arguments)).render(messages)
    except ConfigInvalid:
        return None


def test_all_are_there() -> None:
    assert len(TEMPLATES) >= 72


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_renders_as_in_transformers_or_fails_in_both(path: Path) -> None:
    template, rendered = path.read_text(), 0
    for messages in CONVERSATIONS.values():
        for arguments in ARGUMENTS.values():
            expected = as_in_transformers(template, messages, arguments)
            assert as_here(template, messages, arguments) == expected
            rendered += expected is not None
    assert rendered >= len(ARGUMENTS)
