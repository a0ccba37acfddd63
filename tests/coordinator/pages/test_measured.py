"""Samples of evaluations on the training page and in the API: only if the round says so, and harmless."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from coordinator.pages import measured
from protocol.wire import canonical
from protocol.work.learning import EvaluationSample, EvaluationSamples
from tests.coordinator.pages.rounds import HOSTILE
from tests.coordinator.served import Served, serve

EVALUATED = ("eval.every=1", "eval.problems=3", "eval.samples=2")


async def evaluate(served: Served) -> None:
    """Publish a version, and answer its whole evaluation with 85."""
    await served.publish()
    key = await served.join()
    while leases := await served.lease(key, groups=3):
        for verdict in await served.submit(key, *(served.answer(key, lease) for lease in leases)):
            assert verdict.outcome == "accepted"


@pytest.mark.asyncio
class TestHttp:
    async def test_prompts_stay_private_unless_the_round_publishes_them(self, tmp_path: Path) -> None:
        async with serve(tmp_path, *EVALUATED) as served:
            await evaluate(served)
            answer = await served.client.get("/v1/evaluations/samples", headers={"Accept": "application/json"})
            said = await answer.json()
            page = await (await served.client.get("/training")).text()
        assert answer.status == 404
        assert said["hint"].startswith("The operator can set eval.publish_samples")
        assert "Samples of evaluations" not in page

    async def test_a_round_that_publishes_them_shows_the_number_it_says(self, tmp_path: Path) -> None:
        async with serve(tmp_path, *EVALUATED, "eval.publish_samples=2") as served:
            before = await (await served.client.get("/v1/evaluations/samples")).json()
            await evaluate(served)
            page = await (await served.client.get("/training")).text()
            answer = await served.client.get("/v1/evaluations/samples")
            while not (found := (await answer.json())["evaluations"]):  # figures are shown until they are 2 s old
                answer = await served.client.get("/v1/evaluations/samples")
        assert before["evaluations"] == []
        (evaluation,) = found
        assert (evaluation["number"], evaluation["version"], evaluation["split"]) == (1, 1, "held_out")
        assert len(evaluation["samples"]) == 2
        for sample in evaluation["samples"]:
            assert sample["prompt"].endswith("=")
            assert sample["completion"].startswith("85")
            assert f"<bdi>{sample['prompt']}</bdi>" in page
        assert page.count('<details id="sample-held_out-') == 2

    async def test_the_learner_reads_as_many_as_it_asks_for(self, tmp_path: Path) -> None:
        async with serve(tmp_path, *EVALUATED) as served:
            await evaluate(served)
            path = "/v1/learner/evaluations/1/samples"
            for count, expected in (("1", 1), ("3", 3), ("99999999", 3), ("x", 3)):
                response = await served.client.get(path, params={"count": count}, headers=served.operator)
                found = EvaluationSamples.from_bytes(await response.read())
                assert len(found.samples) == expected, count
            assert (await served.client.get(path)).status == 401
            missing = await served.client.get("/v1/learner/evaluations/2/samples", headers=served.operator)
            assert (missing.status, canonical.decode(await missing.read())["code"]) == (404, "not_found")


def evaluated(number: int, *texts: str, first: int = 0, split: str = "held_out") -> EvaluationSamples:
    answers = (
        EvaluationSample(problem=first + place, prompt=f"prompt {first + place}", completion=text, reward=0.25 * number)
        for place, text in enumerate(texts)
    )
    return EvaluationSamples(number=number, version=10 * number, update=number, split=split, samples=tuple(answers))


class Reader(HTMLParser):
    """A reader that collects tags and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(*evaluations: EvaluationSamples) -> list[str]:
    section = measured.samples_section(evaluations)
    assert section is not None
    return Reader(section).texts


class TestSection:
    def test_each_problem_has_its_answers_now_and_before(self) -> None:
        assert shown(evaluated(3, "new"), evaluated(2, "middle"), evaluated(1, "old")) == [
            "Samples of evaluations", "held-out problem 0: reward 0.25 → 0.75", "Prompt", "prompt 0",
            "Now: version 30, reward 0.75", "new", "Before: version 10, reward 0.25", "old",
        ]  # fmt: skip

    def test_a_first_evaluation_has_nothing_before(self) -> None:
        texts = shown(evaluated(1, "only"))
        assert "held-out problem 0: reward 0.25" in texts
        assert not [text for text in texts if text.startswith("Before")]

    def test_a_problem_that_the_newest_evaluation_lacks_is_not_called_new(self) -> None:
        texts = shown(evaluated(2, "a"), evaluated(1, "b", "c"))
        assert "c" not in texts
        assert len([text for text in texts if text == "Prompt"]) == 1

    def test_splits_are_apart(self) -> None:
        texts = shown(evaluated(2, "a", split="validation"), evaluated(1, "b"))
        assert [text for text in texts if "problem" in text] == [
            "held-out problem 0: reward 0.25", "validation problem 0: reward 0.5",
        ]  # fmt: skip

    @pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
    def test_what_nodes_write_is_text(self, text: str) -> None:
        section = measured.samples_section([evaluated(2, text[:2000]), evaluated(1, text[:2000])])
        assert section is not None
        assert not {"script", "img", "b"} & set(Reader(section).tags)
        assert not set("\u202e\u2066\u200b\x1b") & set(section)

    def test_lines_of_an_answer_stay_apart(self) -> None:
        assert "one\n  two" in shown(evaluated(1, "one\n  two"))

    def test_no_evaluation_is_said_and_no_permission_is_nothing(self) -> None:
        assert "No samples yet: no evaluation has ended." in shown()
        assert measured.samples_section(None) is None
