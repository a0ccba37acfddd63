"""Text and tokens: rewards come from the published tokenizer, and odd tokens earn nothing."""

import json

import pytest

from coordinator.tasks.chat import ChatTemplate
from coordinator.tasks.task_text import TaskText
from coordinator.transactions.prompts import PromptRef
from protocol.errors import ConfigInvalid
from protocol.tasks import ChatMessage, Problem, Reward, Spans, task
from protocol.work.episode import PLAIN
from tests.coordinator.policy_files import END_TOKEN, VOCABULARY, encode, policy_files

FILES = policy_files()


def policy_text(**change: object) -> TaskText:
    generation = {"eos_token_id": END_TOKEN} | change
    files = FILES | {"generation_config.json": json.dumps(generation).encode()}
    return TaskText(files.__getitem__, task("arithmetic"), max_new_tokens=6)


def test_a_prompt_is_the_tasks_own_in_the_policys_tokens() -> None:
    text = policy_text()
    assert text.prompt(PromptRef("train", 0)) == encode("42+76=")
    assert text.prompt(PromptRef("train", 3)) == text.prompt(PromptRef("train", 3))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ([*encode("85"), END_TOKEN], 1.0),
        (encode("85"), 1.0),  # cut off at the limit, but what it says is right
        ([*encode("84"), END_TOKEN], 0.0),
        ([*encode("085"), END_TOKEN], 0.0),
        ([END_TOKEN], 0.0),
        ([0, *encode("85"), END_TOKEN], 0.0),  # a padding token does not vanish from an answer
        ([*encode("8"), 0, *encode("5"), END_TOKEN], 0.0),
        ([*encode("85"), len(VOCABULARY), END_TOKEN], 0.0),  # nor one that the model has and the tokenizer has not
        ([*encode("8"), 2**32 - 1, *encode("5"), END_TOKEN], 0.0),
        ([*encode("85="), END_TOKEN], 0.0),
        (encode("85") * 20, 0.0),
    ],
)
def test_only_the_exact_answer_earns(completion: list[int], reward: float) -> None:
    assert policy_text().judge(Problem("47+38="), completion).score == reward


def test_the_bounds_come_from_the_policys_files() -> None:
    bounds = policy_text().bounds
    assert (bounds.vocab_size, bounds.end_tokens, bounds.max_new_tokens) == (len(VOCABULARY), frozenset([END_TOKEN]), 6)


def test_a_policy_may_have_several_end_tokens() -> None:
    assert policy_text(eos_token_id=[0, END_TOKEN]).bounds.end_tokens == {0, END_TOKEN}


def test_the_end_token_may_stand_in_the_model_configuration_alone() -> None:
    files = FILES | {"generation_config.json": b"{}"}
    text = TaskText(files.__getitem__, task("arithmetic"), max_new_tokens=6)
    assert text.bounds.end_tokens == {END_TOKEN}


@pytest.mark.parametrize(
    ("characters", "tokens"),
    [
        ((), ()),
        (((0, 2),), ((0, 2),)),
        (((1, 3),), ((1, 3),)),
        (((2, 3), (4, 5)), ((2, 3), (4, 5))),
    ],
)
def test_spans_of_characters_become_spans_of_tokens(characters: Spans, tokens: Spans) -> None:
    """A token of this policy is a character."""
    reward = Reward(1.0, "ok", skip=characters)
    assert policy_text().in_tokens(reward, [*encode("12345"), END_TOKEN]).skip == tokens


def test_a_token_is_skipped_with_any_of_its_characters() -> None:
    """A token of two characters, of which the span has one."""
    text = policy_text()
    text.decode = lambda tokens: "ab" * len(tokens)  # type: ignore[method-assign]  # longer tokens than this policy has
    assert text.in_tokens(Reward(1.0, "ok", skip=((1, 3),)), [5, 5, 5]).skip == ((0, 2),)
    assert text.in_tokens(Reward(1.0, "ok", skip=((2, 4),)), [5, 5, 5]).skip == ((1, 2),)


CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ end }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GREETS_ONCE = (
    "{% for message in messages %}{% if loop.first %}Hello. {% endif %}"
    "{% if message.role == 'assistant' %}>{% endif %}{{ message.content }};{% endfor %}>"
)
SAYS_ONCE = "{% for message in messages %}{{ message.content if loop.first else '…' }};{% endfor %}"


def spoken(template: str) -> TaskText:
    generation = json.dumps({"eos_token_id": END_TOKEN}).encode()
    files = FILES | {"generation_config.json": generation, "chat_template.jinja": template.encode()}
    return TaskText(files.__getitem__, task("kuhn", parameters={"chat": True}), max_new_tokens=6)


@pytest.mark.parametrize("template", [CHATML, GREETS_ONCE])
def test_an_episode_is_framed_as_the_policys_template_has_it(template: str) -> None:
    """The node's text, built turn by turn, equals the template's text for the whole conversation."""
    end = policy_text().decode([END_TOKEN])
    template = template.replace("{{ end }}", end)
    text = spoken(template)
    episode = text.episode(PromptRef("train", 0))
    assert episode is not None
    frame = episode.framing
    first, then = ChatMessage("user", "hold K"), ChatMessage("user", "they raise")
    render = ChatTemplate({"chat_template.jinja": template.encode()}.__getitem__).render
    opening = frame.opening + first.content + frame.after
    assert opening == render((first,))
    ended = end if end and end in template else ""
    whole = opening + "call" + ended + frame.before + then.content + frame.after
    assert whole == render((first, ChatMessage("assistant", "call"), then))


def test_a_template_that_treats_later_messages_otherwise_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="does not treat all messages alike"):
        spoken(SAYS_ONCE).episode(PromptRef("train", 0))


def test_without_chat_nothing_is_put_around_messages() -> None:
    files = FILES | {"generation_config.json": json.dumps({"eos_token_id": END_TOKEN}).encode()}
    episode = TaskText(files.__getitem__, task("kuhn"), max_new_tokens=6).episode(PromptRef("train", 0))
    assert episode is not None
    assert episode.framing == PLAIN
