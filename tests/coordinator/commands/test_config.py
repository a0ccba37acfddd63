"""The configuration: every mistake is told with its place, and the nearest name that would have been right."""

import tomllib
from pathlib import Path

import pytest

from coordinator.config import Config, load, parse
from coordinator.config.reading import on_top, with_values
from protocol.errors import ConfigInvalid


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "round.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_every_default_works() -> None:
    assert load(None, []) == parse({})
    assert load(None, []).round.directory.is_absolute()


def test_the_example_is_a_configuration() -> None:
    load(Path(__file__).parents[3] / "examples" / "demo.toml", [])


def test_a_file_and_settings_on_top_of_it(tmp_path: Path) -> None:
    path = write(tmp_path, "[learner]\nlearning_rate = 1e-3\nthreads = 2\n")
    config = load(path, ["learner.threads=4", "sampling.temperature=0.5"])
    assert (config.learner.learning_rate, config.learner.threads, config.sampling.temperature) == (1e-3, 4, 0.5)


@pytest.mark.parametrize(
    ("setting", "section", "key", "value"),
    [
        ("round.seed=7", "round", "seed", 7),
        ("round.seed= 7", "round", "seed", 7),
        ("learner.learning_rate=3e-4", "learner", "learning_rate", 3e-4),
        ("model.path=embedded", "model", "path", "embedded"),
        ('model.path="embedded"', "model", "path", "embedded"),
        ("model.path=folder/with = sign", "model", "path", "folder/with = sign"),
        ("round.public_url=http://example.org:1/", "round", "public_url", "http://example.org:1/"),
        ("round.public_url=", "round", "public_url", ""),
    ],
)
def test_a_setting_is_toml_or_plain_text(setting: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load(None, [setting]), section), key) == value


def test_the_last_setting_wins() -> None:
    assert load(None, ["round.seed=1", "round.seed=2"]).round.seed == 2


@pytest.mark.parametrize("setting", ["", "seed", "seed=1", "round.=1", ".seed=1", "round.seed", "=", "."])
def test_what_is_no_setting_is_refused(setting: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"section\.key=value"):
        load(None, [setting])


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("learner.learning_rat=1", "learner.learning_rate"),
        ("leases.timeout=1", "leases.timeout_s"),
        ("round.max_update=1", "round.max_updates"),
        ("lerner.threads=1", "mean learner"),
        ("market.budget=1", "market.budget_micros"),
        ("xyz.abc=1", "Sections:"),
        ("round.seed.more=1", "round.seed"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(setting: str, nearest: str) -> None:
    with pytest.raises(ConfigInvalid, match=nearest):
        load(None, [setting])


@pytest.mark.parametrize(
    "setting",
    [
        "sampling.temperature=0",
        "sampling.temperature=nan",
        "sampling.temperature=inf",
        "sampling.samples_per_group=1",
        "sampling.samples_per_group=65",
        "sampling.max_new_tokens=0",
        "sampling.max_new_tokens=1000000",
        "learner.learning_rate=-1",
        "learner.learning_rate=fast",
        "learner.groups_per_update=0",
        "staleness.max_updates=-1",
        "round.max_updates=0",
        "round.seed=-1",
        "round.seed=1.5",
        "leases.timeout_s=-1",
        "leases.groups_per_request=65",
        "market.budget_micros=-1",
        "publish.chunk_size_bytes=1",
        "publish.chunk_size_bytes=100000000",
        "publish.timestamp_lifetime_s=0",
        "data.template_arguments={messages = []}",
        "round=5",
    ],
)
def test_a_value_out_of_range_is_refused_with_its_place(setting: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(None, [setting])
    if "." in setting:
        assert setting.partition("=")[0] in str(caught.value)


def test_rewards_of_a_task_that_judges_by_itself_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"^task arithmetic judges by itself"):
        load(None, ['reward.functions="exact"'])


def test_publishing_too_rarely_for_the_bound_is_refused() -> None:
    load(None, ["staleness.max_updates=2", "staleness.publish_every=3"])
    with pytest.raises(ConfigInvalid, match="publish_every = 4"):
        load(None, ["staleness.max_updates=2", "staleness.publish_every=4"])


@pytest.mark.parametrize(("staleness", "kappa"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 3)])
def test_versions_are_published_often_enough_by_themselves(staleness: int, kappa: int) -> None:
    assert load(None, [f"staleness.max_updates={staleness}"]).staleness.kappa == kappa


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[round", id="no TOML"),
        pytest.param("a = 1", id="no section"),
        pytest.param("round = 5", id="a section that is a value"),
        pytest.param("[[round]]\nseed = 1", id="a list of sections"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param("[round]\nseed = 1\nseed = 2", id="a key twice"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str | bytes) -> None:
    path = write(tmp_path, text)
    for settings in ([], ["round.seed=1"]):
        with pytest.raises(ConfigInvalid):
            load(path, settings)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"round\.toml"):
        load(tmp_path / "round.toml", [])


def test_a_resolved_configuration_survives_storing() -> None:
    config = load(None, ["round.seed=3"])
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_what_stood_on_top_of_a_file_is_found_again(tmp_path: Path) -> None:
    """Text with spaces, a path, a table, and a mode, which has other defaults."""
    file = tmp_path / "round.toml"
    file.write_text("[market]\nbudget_micros = 7\n[learner]\nlearning_rate = 0.001\n")
    settings = [
        "market.budget_micros=9",
        "task.name=a b",
        "round.tls_key=/somewhere/tls key.pem",
        'task.parameters={"a b" = 1, c = "d"}',
        "round.mode=sequential",
    ]
    for chosen in ([], settings[:1], settings):
        ran = load(file, chosen)
        again = on_top(file, ran)
        assert load(file, again) == ran
        assert len(again) >= len(chosen)
    assert on_top(file, load(file, [])) == []


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", '\n\n[round]\ndirectory = "/a b"\n'),
        ("# mine\n[round] # this\ntitle = 'x'\n", "# mine\n[round] # this\ndirectory = \"/a b\"\ntitle = 'x'\n"),
        ("[round]\ndirectory = 'x'  # old\n[model]\npath = 'y'\n", None),
        ("[model]\npath = 'y'\n", None),
        ('[round]\ntitle = """\n[model]\n"""\n', None),
    ],
)
def test_a_setting_in_a_file_is_changed_and_the_rest_of_the_file_is_not(text: str, changed: str | None) -> None:
    found = with_values(text, {"round.directory": "/a b"})
    assert found is not None
    assert tomllib.loads(found)["round"]["directory"] == "/a b"
    assert changed in (None, found)


@pytest.mark.parametrize("text", ["round = {title = 'x'}\n", "round.title = 'x'\n"])
def test_a_file_that_cannot_be_changed_line_by_line_is_left(text: str) -> None:
    assert with_values(text, {"round.directory": "/a"}) is None


def test_a_file_that_counts_only_with_what_stood_on_top_is_completed(tmp_path: Path) -> None:
    file = tmp_path / "round.toml"
    file.write_text("[staleness]\nmax_updates = 1\npublish_every = 50\n")
    with pytest.raises(ConfigInvalid):
        load(file, [])
    ran = load(file, ["staleness.max_updates=100"])
    assert load(file, on_top(file, ran)) == ran
