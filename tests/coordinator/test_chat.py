"""Chat prompts: the policy's own template decides how they look, and reaches nothing."""

import json

import pytest

from coordinator.data.chat import ChatTemplate
from protocol.errors import ConfigInvalid
from protocol.tasks import ChatMessage

ASKED = (ChatMessage("system", "Add."), ChatMessage("user", "1+1"))
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<' + message['role'] + '>' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
SPECIAL = {"bos_token": "^", "eos_token": {"content": "$", "special": True}}


def template(text: object = TEMPLATE, **files: bytes) -> ChatTemplate:
    settings = json.dumps(SPECIAL | {"chat_template": text}).encode()
    return ChatTemplate({"tokenizer_config.json": settings, **files}.__getitem__)


def test_messages_end_where_the_answer_begins() -> None:
    assert template().render(ASKED) == "^<system>Add.$<user>1+1$<assistant>"


def test_a_template_of_its_own_file_goes_first() -> None:
    own = {"chat_template.jinja": b"{{ messages[1].content }}?"}
    assert template(**own).render(ASKED) == "1+1?"


def test_of_several_templates_the_default_is_taken() -> None:
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert template(several).render(ASKED) == "yes"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no chat template"),
        ("{% for %}", "no Jinja"),
        ("{{ raise_exception('system goes first') }}", "system goes first"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append('more') }}", "unsafe"),
        ("{{ range(10**9) | list }}", "[Rr]ange"),
    ],
)
def test_a_template_that_is_wrong_or_hostile_is_refused(text: object, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        template(text).render(ASKED)
