"""Accuracy by one forward pass, and the corpus and course of the warm start."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from coordinator.learner import warmstart
from coordinator.learner.warmstart import Encode, accuracy, answered
from protocol.tasks import Problem
from protocol.tasks.arithmetic import Arithmetic

END = 2


@pytest.fixture
def encode(policy_folder: Path) -> Encode:
    tokenizer = Tokenizer.from_file(str(policy_folder / "tokenizer.json"))
    return lambda prompt: list(tokenizer.encode(str(prompt)).ids)


def test_accuracy_is_that_of_greedy_decoding(policy_folder: Path, encode: Encode) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(policy_folder)
    problems = Arithmetic().problems("validation")[:40]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        warmstart.imitate(model, optimizer, answered(problems[:20], encode, END))
    right = 0
    for problem in problems:
        asked = torch.tensor([encode(problem.prompt)])
        said = model.generate(asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=5)
        right += said[0, asked.shape[1] :].tolist() == [*encode(problem.answer), END]
    assert 10 < right < 30, "the comparison needs right and wrong answers"
    assert accuracy(model, problems, encode, END) == right / 40


def test_accuracy_holds_no_more_logits_than_it_may(policy_folder: Path, encode: Encode) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(policy_folder)
    problems, held = Arithmetic().problems("validation")[:40], list[int]()
    whole = accuracy(model, problems, encode, END)
    model.register_forward_hook(lambda _model, _inputs, found: held.append(found.logits.numel()))
    most = 8 * model.config.vocab_size * 10  # eight rows of at most ten tokens
    assert accuracy(model, problems, encode, END, logits_max=most) == whole
    assert len(held) > 1
    assert max(held) <= most


def test_every_part_of_a_measurement_counts_as_progress(policy_folder: Path, encode: Encode) -> None:
    """Otherwise the watchdog ends a learner whose measurement takes longer than a step may, at every start."""
    model: Any = AutoModelForCausalLM.from_pretrained(policy_folder)
    problems, parts = Arithmetic().problems("validation")[:6], list[int]()
    accuracy(model, problems, encode, END, logits_max=1, moved=lambda: parts.append(1))
    assert len(parts) == len(problems)


@pytest.mark.parametrize(("count", "measured"), [(1, 1), (490, 490), (512, 512), (7473, 499), (100_000, 513)])
def test_a_large_file_of_problems_is_measured_by_a_part_of_it(count: int, measured: int) -> None:
    problems = [Problem(str(number), "1") for number in range(count)]
    chosen = warmstart.evenly_spaced(problems)
    assert len(chosen) == measured
    assert chosen[0] == problems[0]
    assert int(str(chosen[-1].prompt)) >= count - count // measured - 1


def test_a_single_row_is_computed_however_wide_its_logits_are(policy_folder: Path, encode: Encode) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(policy_folder)
    problems = Arithmetic().problems("validation")[:3]
    assert accuracy(model, problems, encode, END, logits_max=1) == accuracy(model, problems, encode, END)


def test_problems_are_fed_where_the_model_lies(policy_folder: Path, encode: Encode) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(policy_folder)
    model.to("meta")
    fed = list[torch.device]()

    def note(_model: Any, _inputs: Any, named: dict[str, Any]) -> None:
        fed.append(named["input_ids"].device)

    model.register_forward_pre_hook(note, with_kwargs=True)
    problems = Arithmetic().problems("validation")[:4]
    with suppress(RuntimeError):  # a tensor without numbers has no loss to be told
        warmstart.imitate(model, torch.optim.AdamW(model.parameters()), answered(problems, encode, END))
    with suppress(RuntimeError):
        accuracy(model, problems, encode, END)
    assert fed == [torch.device("meta")] * 2


def test_the_warm_start_ends_and_tells_how_far_it_is(policy_folder: Path, encode: Encode) -> None:
    """A model this small learns no sums: the bound on the steps ends it."""
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    told: list[float] = []

    def note(fraction: float, text: str) -> None:
        assert "teacher" in text
        told.append(fraction)

    warmstart.warm_start(model, Arithmetic(), encode, END, note, steps_max=30)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_the_warm_start_depends_on_the_seed_alone(policy_folder: Path, encode: Encode) -> None:
    weights = []
    for number in range(2):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(policy_folder)
        warmstart.warm_start(model, Arithmetic(seed=3), encode, END, lambda *_: None, steps_max=10)
        weights.append(torch.cat([tensor.flatten() for tensor in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
