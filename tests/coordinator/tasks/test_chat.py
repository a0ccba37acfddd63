"""Chat prompts: the policy's own template decides how they look, and reaches nothing."""

import json

import pytest

from coordinator.config import Config
from coordinator.tasks.chat import PLAIN_CHAT, Chat, ChatTemplate
from protocol.errors import ConfigInvalid
from protocol.tasks import ChatMessage

ASKED = (ChatMessage("system", "Add."), ChatMessage("user", "1+1"))
TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {{- '<' + message['role'] + '>' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
SPECIAL = {"bos_token": "^", "eos_token": {"content": "$", "special": True}}


def template(text: object = TEMPLATE, chat: Chat = PLAIN_CHAT, own: bytes = b"") -> ChatTemplate:
    settings = json.dumps(SPECIAL | {"chat_template": text}).encode()
    files = {"tokenizer_config.json": settings} | ({"chat_template.jinja": own} if own else {})
    return ChatTemplate(files.__getitem__, chat)


def test_messages_end_where_the_answer_begins() -> None:
    assert template().render(ASKED) == "^<system>Add.$<user>1+1$<assistant>"


def test_a_template_of_its_own_file_goes_first() -> None:
    assert template(own=b"{{ messages[1].content }}?").render(ASKED) == "1+1?"


def test_of_several_templates_the_default_is_taken() -> None:
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    assert template(several).render(ASKED) == "yes"


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "1+1"),
        ("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}", "Add."),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "1+1!"),
        ("{{ strftime_now('%d %B %Y') }}", "01 January 2026"),
        ("{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true) }}", '{"a": 1, "b": "<é>"}'),
        ("{{ [1] | tojson(separators=(',', ':'), indent=1) }}", "[\n 1\n]"),
        ("{% if tools is not none %}tools{% endif %}{{ documents is defined }}", "True"),
        ("{% set seen = namespace(count=0) %}{% set seen.count = 2 %}{{ seen.count }}", "2"),
        ("{{ dict(a=1) }}{{ dict.fromkeys('a') }}", "{'a': 1}{'a': None}"),
    ],
)
def test_a_template_has_what_transformers_gives_it(text: str, rendered: str) -> None:
    """`make test-trl` compares whole templates with transformers."""
    assert template(text).render(ASKED) == rendered


def test_the_operator_gives_a_template_its_arguments() -> None:
    table = {"data": {"template_arguments": {"enable_thinking": False, "tools": [{"name": "add"}]}}}
    chat = Chat.from_config(Config.model_validate(table).data)
    text = "{{ enable_thinking is false }} {{ tools | tojson }}"
    assert template(text, chat).render(ASKED) == 'True [{"name": "add"}]'


def test_the_system_prompt_goes_first_unless_there_is_one() -> None:
    chat = Chat.from_config(Config.model_validate({"data": {"system_prompt": "Be short."}}).data)
    rendered = template(chat=chat).render
    assert rendered(ASKED[1:]) == "^<system>Be short.$<user>1+1$<assistant>"
    assert rendered(ASKED) == "^<system>Add.$<user>1+1$<assistant>"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no chat template"),
        ("{% for %}", "not valid Jinja"),
        ("{{ raise_exception('system goes first') }}", "system goes first"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append('more') }}", "unsafe"),
        ("{{ range(10**9) | list }}", "[Rr]ange"),
        ("{{ namespace(__class__=1) }}", "__class__"),
        ("{% set seen = namespace() %}{% set seen.__dict__ = 1 %}", "__dict__"),
        ("{{ dict.__subclasses__() }}", "no attribute '__subclasses__'"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_a_template_that_is_wrong_or_hostile_is_refused(text: object, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says):
        template(text).render(ASKED)
