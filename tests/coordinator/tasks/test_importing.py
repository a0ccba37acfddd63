"""A round's copy of its problems: whatever they came from, complete, without repetition, and never changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.config import Config, parse
from coordinator.tasks import importing, kinds
from coordinator.tasks.import_child import prepare
from coordinator.tasks.task import DataTask, ExactTask, open_task
from protocol.errors import ConfigInvalid, UnknownTask
from protocol.tasks import ChatMessage, Exact, Judging, Problem

ROWS = [{"question": f"{number}+1=", "answer": number + 1, "level": number % 3} for number in range(300)]


def config(folder: Path, table: dict[str, Any] | None = None, *, name: str = "data", **data: Any) -> Config:
    round_ = {"directory": str(folder / "round")}
    return parse({"round": round_, "task": {"name": name}, "data": data} | (table or {}))


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def copied(settings: Config) -> DataTask:
    importing.make_copy(settings, settings.round.directory / kinds.FOLDER)
    made = open_task(settings)
    assert isinstance(made, DataTask)
    return made


def every(task: DataTask, count: int) -> list[Problem]:
    return [task.problem(number) for number in range(count)]


def test_every_problem_is_in_one_split_and_each_pass_takes_all(tmp_path: Path) -> None:
    task = copied(config(tmp_path, train=lines(tmp_path / "p.jsonl", ROWS)))
    held_out, validation = set(prompts(task.problems("held_out"))), set(prompts(task.problems("validation")))
    size = len(ROWS) - len(held_out) - len(validation)
    first, second = every(task, size), [task.problem(number) for number in range(size, 2 * size)]
    assert 15 < len(held_out) < 50
    assert 0 < len(validation) < 20
    assert len(set(prompts(first))) == size
    assert set(prompts(first)) | held_out | validation == {row["question"] for row in ROWS}
    assert set(prompts(second)) == set(prompts(first))
    assert prompts(second) != prompts(first)
    assert prompts(every(task, size)) == prompts(first)


def prompts(problems: Any) -> list[Any]:
    return [problem.prompt for problem in problems]


def test_without_shuffling_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    held = lines(tmp_path / "held.jsonl", [{"prompt": "held", "answer": "a"}])
    task = copied(config(tmp_path, train=lines(tmp_path / "p.jsonl", ROWS[:5]), eval=held, shuffle=False))
    train = [row["question"] for row in ROWS[:5] if row["question"] not in prompts(task.problems("validation"))]
    assert prompts(every(task, len(train))) == train


def test_columns_come_to_the_reward_as_they_are(tmp_path: Path) -> None:
    row = {"ask": {"text": "1+1"}, "verl": json.dumps({"truth": [2, "two"]}), "level": 7, "none": None}
    columns = {"prompt": "ask.text", "answer": "verl.truth"}
    task = copied(config(tmp_path, train=lines(tmp_path / "p.jsonl", [row]), columns=columns, suffix="?"))
    problem = next(found for split in (every(task, 1),) for found in split)
    assert problem.prompt == "1+1?"
    assert problem.answer == '[2, "two"]'
    assert problem.columns["answer"] == [2, "two"]
    assert (problem.columns["level"], problem.columns["none"]) == (7, None)


def rows_of(tmp_path: Path, column: str) -> Config:
    """Return the settings of a task file whose only problem has this answer."""
    file = tmp_path / "task.py"
    file.write_text(
        "import datetime, decimal, uuid\nimport numpy as np\n"
        f"def problems(split, seed):\n    return [{{'prompt': split, 'answer': {column}}}]\n"
        "def reward(problem, completion):\n    return 0.0\n"
    )
    return config(tmp_path, name=str(file))


@pytest.mark.parametrize(
    ("column", "answer", "text"),
    [
        ("datetime.datetime(2024, 1, 2, 3, 4)", "2024-01-02T03:04:00", "2024-01-02T03:04:00"),
        ("datetime.date(2024, 1, 2)", "2024-01-02", "2024-01-02"),
        ("datetime.timedelta(hours=1)", 3600.0, "3600.0"),
        ("decimal.Decimal('2.50')", "2.50", "2.50"),
        ("uuid.UUID(int=1)", "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000001"),
        ("np.arange(3).reshape(1, 3)", [[0, 1, 2]], "[[0, 1, 2]]"),
        ("{'most': np.int64(5), 'is': np.bool_(True)}", {"most": 5, "is": True}, '{"most": 5, "is": true}'),
        ("'é'.encode()", "é", "é"),
        ("np.arange(2000)", list(range(2000)), json.dumps(list(range(2000)))),
        ("np.datetime64('2024-01-02T03:04', 'ns')", "2024-01-02T03:04:00", "2024-01-02T03:04:00"),
        ("np.array(['2024-01-02', 'NaT'], 'M8[ns]')", ["2024-01-02T00:00:00", None], '["2024-01-02T00:00:00", null]'),
        ("np.timedelta64(1500, 'ms').astype('m8[ns]')", 1.5, "1.5"),
        ("np.datetime64('2024-01-02')", "2024-01-02", "2024-01-02"),
    ],
)
def test_values_that_json_lacks_come_as_what_they_mean_and_not_as_their_repr(
    tmp_path: Path, column: str, answer: object, text: str
) -> None:
    problem = copied(rows_of(tmp_path, column)).problem(0)
    assert problem.columns["answer"] == answer
    assert problem.answer == text


@pytest.mark.parametrize(
    ("column", "says"),
    [("b'\\x89PNG'", "4 bytes that are no text"), ("{1, 2}", "a value of the type set"), ("[object()]", "object")],
)
def test_a_column_that_no_reward_can_get_is_refused_by_its_name(tmp_path: Path, column: str, says: str) -> None:
    with pytest.raises(ConfigInvalid, match="the column answer contains") as refused:
        importing.make_copy(rows_of(tmp_path, column), tmp_path / "copy")
    assert says in str(refused.value)


@pytest.mark.parametrize("kept_as", [dict, json.dumps])
def test_a_row_of_verls_needs_no_columns_named(tmp_path: Path, kept_as: Callable[[dict[str, str]], object]) -> None:
    asked = [{"role": "user", "content": "1+1"}]
    row = {"data_source": "sums", "prompt": asked, "reward_model": kept_as({"style": "rule", "ground_truth": "2"})}
    task = copied(config(tmp_path, train=lines(tmp_path / "p.jsonl", [row])))
    (problem,) = (found for split in (every(task, 1),) for found in split)
    assert (problem.prompt, problem.answer) == ((ChatMessage("user", "1+1"),), "2")


def test_prompts_may_be_messages(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1"}]
    task = copied(config(tmp_path, train=lines(tmp_path / "p.jsonl", [{"prompt": said}]), suffix="!"))
    assert task.problem(0).prompt == (ChatMessage("system", "Add."), ChatMessage("user", "1+1!"))
    asked = copied(config(tmp_path / "b", train=lines(tmp_path / "q.jsonl", [{"prompt": "1+1"}]), chat=True))
    assert asked.problem(0).prompt == (ChatMessage("user", "1+1"),)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_prompt_may_be_an_array_of_messages_as_pandas_reads_them(tmp_path: Path, count: int) -> None:
    messages = f"np.array([{{'role': 'user', 'content': split}}] * {count}, object)"
    settings = rows_of(tmp_path, f"'', 'prompt': {messages}")
    if not count:
        with pytest.raises(ConfigInvalid, match="the prompt is empty"):
            importing.make_copy(settings, tmp_path / "copy")
        return
    assert copied(settings).problem(0).prompt == (ChatMessage("user", "train"),) * count


def test_a_problem_that_is_held_out_is_never_learned_from(tmp_path: Path) -> None:
    held = lines(tmp_path / "held.jsonl", ROWS[:100])
    settings = config(tmp_path, train=lines(tmp_path / "p.jsonl", ROWS + ROWS[:50]), eval=held)
    task = copied(settings)
    assert prompts(task.problems("held_out")) == [row["question"] for row in ROWS[:100]]
    assert not set(prompts(every(task, 190))) & set(prompts(task.problems("held_out")))
    note = json.loads((settings.round.directory / kinds.FOLDER / kinds.NOTE).read_text())
    assert note["repeated"] == 150


def test_a_folder_as_the_hub_has_it_knows_its_splits(tmp_path: Path) -> None:
    import duckdb

    folder = tmp_path / "hub"
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text("# Sums\n")
    with duckdb.connect() as connection:
        for split, first, count in (("train", 0, 40), ("test", 100, 10)):
            said = "[{'role': 'user', 'content': (range + 1)::VARCHAR}]"
            rows = (
                f"SELECT {said} AS prompt, range * 2 AS answer, range::DECIMAL(9, 2) AS odd, DATE '2024-01-02' AS day"
            )
            where = f"{folder}/main/{split}-00000-of-00001.parquet"
            connection.execute(f"COPY ({rows} FROM range({first}, {first + count})) TO '{where}' (FORMAT parquet)")
    task = copied(config(tmp_path, train=str(folder)))
    assert len(task.problems("held_out")) == 10
    problem = task.problems("held_out")[0]
    assert problem.prompt == (ChatMessage("user", "101"),)
    assert (problem.answer, problem.columns["odd"], problem.columns["day"]) == ("200", "100.00", "2024-01-02")


def test_an_exact_answer_is_judged_without_a_process(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", ROWS)
    task = copied(config(tmp_path, train=path))
    assert isinstance(task, ExactTask)
    assert isinstance(task, Judging)
    assert isinstance(task, Exact)
    assert [task.reward(Problem("1+1=", "2"), said).score for said in ("2", " 2\n", "3", "")] == [1.0, 1.0, 0.0, 0.0]
    other = copied(config(tmp_path / "b", {"reward": {"functions": "mine.py:fn"}}, train=path))
    assert not isinstance(other, Judging)
    assert not isinstance(other, Exact)


FILE = """
def problems(split, seed):
    number = {"train": 0, "validation": 10**6, "held_out": 2 * 10**6}[split]
    while True:
        number += 1
        yield {"prompt": f"{seed}/{number}", "answer": str(number)}

def reward(completions, answer, **columns):
    return [float(said == right) for said, right in zip(completions, answer)]
"""


def test_a_file_of_the_operators_is_run_once_and_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "my_task.py"
    path.write_text(FILE)
    settings = config(tmp_path, name=str(path), size=50)
    digest = prepare(settings, anew=True)
    task = open_task(settings)
    assert task.name == "my_task"
    assert len({task.problem(number).prompt for number in range(50)}) == 50
    assert len(task.problems("held_out")) == 1000
    path.write_text(FILE.replace("float(", "2.0 * float("))
    assert prepare(settings, anew=False) == digest, "the reward may be mended"
    path.unlink()
    assert prepare(settings, anew=False) == digest, "the copy is all that is needed"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "no function problems"),
        ("def problems(split, seed): return [3]", "held_out problem 1 is not a dict"),
        ("def problems(split, seed): return [{'text': 1}]", "has no prompt: its columns are text"),
        ("def problems(split, seed): return []", "no problem to train on"),
        ('def problems(split, seed): yield {"prompt": "1"}', "1 of held_out, and no problem is in two splits"),
        (
            'def problems(split, seed): return [{"prompt": n} for n in "123" * 3]',
            "only 3 of its 27 problems are",
        ),
        ("def problems(split, seed): raise KeyError('x')", r"raised KeyError: 'x' \(my_task\.py:1\)"),
        ("def problems(split, seed):\n    yield {}['secret']", r"raised KeyError: 'secret' \(my_task\.py:2\)"),
        (
            "import json\ndef problems(split, seed):\n    return json.loads('{')",
            r"JSONDecodeError: .*\(my_task\.py:3\)",
        ),
        ("x = 1\nopen('/no/such/file')", r"^my_task\.py raised FileNotFoundError: .*'/no/such/file' \(my_task\.py:2\)"),
        ("def problems(split, seed)", r"^my_task\.py raised SyntaxError: expected ':' \(my_task\.py, line 1\)\."),
        ("def problems(split, seed): return [{'prompt': 3}]", "neither text nor messages"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "my_task.py"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match=says):
        copied(config(tmp_path, name=str(path)))


def test_what_goes_wrong_in_the_process_is_told_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="no file or folder"):
        prepare(config(tmp_path, train="missing.jsonl"), anew=True)
    with pytest.raises(UnknownTask, match=r"arithmetic, .*data, math"):
        prepare(config(tmp_path, name="poker?"), anew=True)
    assert prepare(config(tmp_path, name="arithmetic"), anew=True) == ""


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt"', r"p\.jsonl:2 is not JSON"),
        ("p.jsonl", b"[1]\n", r"p\.jsonl:1 is not a JSON object"),
        ("p.jsonl", b"\xff\xfe", r"p\.jsonl:1 is not JSON"),
        ("p.jsonl", b"", "no problem to train on"),
        ("p.jsonl", b'{"text": "a"}', "its columns are text"),
        ("p.jsonl", b'{"prompt": "a\n{"prompt": "b"}', r"p\.jsonl:1 is not JSON: Unterminated string"),
        ("p.jsonl", b'{"prompt": "a"}\n\n\n{"prompt": ""}', r"p\.jsonl:4: the prompt is empty"),
        ("p.jsonl", b'{"prompt": ""}', r"p\.jsonl:1: the prompt is empty"),
        ("p.jsonl", b'{"prompt": 17}', "neither text nor messages, but 17"),
        ("p.jsonl", b'{"prompt": [{"role": "user"}]}', "neither text nor messages"),
        ("p.jsonl", b'{"prompt": "' + b"x" * 2**22 + b'"}', "longer than"),
        ("p.jsonl", b"[" * 100_000, "is not JSON"),
        ("p.json", b'[{"prompt": "a"}, 3]', "item 2 is not an object"),
        ("p.parquet", b"PAR1 no", "cannot be read"),
        ("p.csv", b"a,b", "has an unknown format"),
    ],
)
def test_a_broken_file_says_where(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigInvalid, match=says):
        copied(config(tmp_path, train=str(path)))


def test_bad_rows_are_named_together_and_all_are_counted(tmp_path: Path) -> None:
    good, bad = '{"prompt": "a%s"}', ['{"prompt": ""}', '{"prompt"', '{"text": "b"}', "[1]"]
    train, held = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("\n".join([good % 1, *bad, good % 2, *bad]))
    held.write_text("\n".join([good % 3, *bad]))
    with pytest.raises(ConfigInvalid) as caught:
        copied(config(tmp_path, train=str(train), eval=str(held)))
    first, *named = caught.value.message.splitlines()
    assert first == "12 rows cannot be used as problems. The first 10:"
    assert [line.split()[0].removesuffix(":").rpartition("/")[2] for line in named] == [
        *(f"test.jsonl:{number}" for number in (2, 3, 4, 5)),
        *(f"train.jsonl:{number}" for number in (2, 3, 4, 5, 7, 8)),
    ]
    assert caught.value.hint.count("Each line is one JSON object.") == 1
    train.write_text("\n".join([good % 1, *bad]))
    with pytest.raises(ConfigInvalid, match=r"^8 rows cannot be used as problems\.\n"):
        copied(config(tmp_path, train=str(train), eval=str(held)))


def test_a_source_that_changed_is_refused_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    settings = config(tmp_path, train=lines(path, ROWS))
    folder = settings.round.directory / kinds.FOLDER
    importing.make_copy(settings, folder)
    importing.check_copy(folder)
    lines(path, ROWS[:-1])
    with pytest.raises(ConfigInvalid, match="has changed since this round was created"):
        importing.check_copy(folder)
    lines(path, ROWS)
    importing.check_copy(folder)
    (folder / "train.jsonl").write_bytes((folder / "train.jsonl").read_bytes()[:-2])
    with pytest.raises(ConfigInvalid, match="have changed since this round"):
        importing.check_copy(folder)


def test_a_copy_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    """The power fails before the note is written."""
    settings = config(tmp_path, train=lines(tmp_path / "p.jsonl", ROWS))
    folder = settings.round.directory / kinds.FOLDER
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"prompt": "half')
    prepare(settings, anew=False)
    assert open_task(settings).problem(0).answer


def test_the_hubs_cache_is_read_when_it_is_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    revision = "a" * 40
    cached = tmp_path / "cache" / "datasets--someone--sums"
    lines(cached / "snapshots" / revision / "main" / "train.jsonl", ROWS[:50])
    lines(cached / "snapshots" / revision / "main" / "test.jsonl", ROWS[50:60])
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    task = copied(config(tmp_path, train="hf://someone/sums/main"))
    assert len(task.problems("held_out")) == 10
    with pytest.raises(ConfigInvalid, match="cannot be downloaded"):
        copied(config(tmp_path, train="hf://someone/else"))


def test_a_generator_of_reasoning_gym_by_name_and_seed(tmp_path: Path) -> None:
    task_table = {"task": {"name": "reasoning-gym", "parameters": {"generator": "chain_sum", "seed": 3}}}
    task = copied(config(tmp_path, task_table, size=60))
    again = copied(config(tmp_path / "again", task_table, size=60))
    problem = task.problem(5)
    assert problem == again.problem(5)
    assert problem.columns["generator"] == "chain_sum"
    assert problem.answer == str(eval(str(problem.prompt).rpartition(": ")[2].rstrip(" =.?")))
    assert not isinstance(task, Judging), "its reward runs where it can be killed"
