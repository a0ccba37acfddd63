"""Text and tokens: rewards come from the published tokenizer, and odd tokens earn nothing."""

import json
from typing import Any

import pytest

from coordinator.rules.prompt_refs import PromptRef
from coordinator.tasks.chat import ChatTemplate
from coordinator.tasks.task_text import TaskText
from protocol.errors import ConfigInvalid, VerifierFailed
from protocol.tasks import ChatMessage, Problem, Reward, Spans, task
from protocol.work.rollout import pack_tokens, unpack_tokens
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
HOLD = Problem((ChatMessage("user", "hold K"),))


def spoken(template: str) -> TaskText:
    generation = json.dumps({"eos_token_id": END_TOKEN}).encode()
    files = FILES | {"generation_config.json": generation, "chat_template.jinja": template.encode()}
    return TaskText(files.__getitem__, task("arithmetic"), max_new_tokens=6)


@pytest.mark.parametrize("template", [CHATML, GREETS_ONCE])
@pytest.mark.parametrize("observation", ["they raise", [{"role": "user", "content": "they raise"}]])
def test_an_episode_reads_as_the_policys_template_has_it(template: str, observation: str | list[Any]) -> None:
    """The text that is built turn by turn equals the template's text for the whole conversation."""
    end = policy_text().decode([END_TOKEN])
    template = template.replace("{{ end }}", end)
    text = spoken(template)
    ends = frozenset({END_TOKEN})
    turn = [*encode("1+2"), END_TOKEN] if end in template else encode("1+2")
    read = unpack_tokens(text.observed(HOLD, observation, turn, ends)).tolist()
    render = ChatTemplate({"chat_template.jinja": template.encode()}.__getitem__).render
    whole = render((ChatMessage("user", "hold K"), ChatMessage("assistant", "1+2"), ChatMessage("user", "they raise")))
    assert text.decode([*text.encode(HOLD.prompt), *turn, *read]) == text.decode(text.codec.encode(whole))


def test_a_turn_that_was_cut_gets_the_templates_end() -> None:
    text = spoken(CHATML.replace("{{ end }}", policy_text().decode([END_TOKEN])))
    ended, cut = (text.observed(HOLD, "1", turn, frozenset({END_TOKEN})) for turn in ([END_TOKEN], encode("2")))
    assert cut == pack_tokens([END_TOKEN]) + ended


def test_a_template_that_does_not_show_turns_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="does not show a turn once"):
        spoken(SAYS_ONCE).observed(HOLD, "1", [END_TOKEN], frozenset({END_TOKEN}))


def test_in_plain_text_nothing_is_put_around_what_an_environment_says() -> None:
    text = policy_text()
    assert text.observed(Problem("1+1="), "12", encode("3"), frozenset({END_TOKEN})) == pack_tokens(encode("12"))
    with pytest.raises(VerifierFailed, match="prompts are plain text"):
        text.observed(Problem("1+1="), [{"role": "user", "content": "1"}], encode("3"), frozenset({END_TOKEN}))
