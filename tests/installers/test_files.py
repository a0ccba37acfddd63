"""The installers' files hold together: the lock, the service files, the container files, both scripts."""

import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import tree_sitter_powershell
import yaml
from tree_sitter import Language, Node, Parser

from coordinator.config import load
from swarm_node.reach.listening import PORTS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "installers"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==([\w.+!-]+)", path.read_text(), re.MULTILINE)
    return {normal(name): version for name, version in found}


def test_the_lock_is_what_constraints_and_dependencies_say() -> None:
    locked, constraints = pins(FOLDER / "node.lock"), pins(ROOT / "constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {normal(re.split(r"[\[<>=!~; ]", one)[0]) for one in project["dependencies"]}
    assert wanted <= set(locked), f"run `make lock`: {sorted(wanted - set(locked))} missing"
    moved = {name for name, version in locked.items() if constraints.get(name, version) != version}
    assert not moved, f"run `make lock`: {sorted(moved)} differ from constraints.txt"


@pytest.mark.parametrize(("name", "package"), [("build.lock", "hatchling"), ("uv.lock", "uv")])
def test_tools_of_the_installer_are_those_that_constraints_name(name: str, package: str) -> None:
    locked, constraints = pins(FOLDER / name), pins(ROOT / "constraints.txt")
    assert package in locked
    moved = {name for name, version in locked.items() if constraints.get(name, version) != version}
    assert not moved, f"run `make lock`: {sorted(moved)} differ from constraints.txt"
    blocks = re.split(r"\n(?=\S)", (FOLDER / name).read_text().strip())
    assert all("--hash=sha256:" in block for block in blocks)


@pytest.mark.parametrize("lock", ["node.lock", "vllm.lock"])
def test_every_locked_package_has_a_hash(lock: str) -> None:
    blocks = re.split(r"\n(?=\S)", (FOLDER / lock).read_text().strip())
    assert len(blocks) >= len(pins(FOLDER / lock)) > 50  # more, where a package has another version for another Python
    assert all("--hash=sha256:" in block for block in blocks)


def test_the_lock_of_vllm_is_what_was_asked_for_with_our_frames_and_names() -> None:
    locked, constraints = pins(FOLDER / "vllm.lock"), pins(ROOT / "constraints.txt")
    assert pins(FOLDER / "vllm.in").items() <= locked.items(), "run `make lock`"
    assert {name: locked[name] for name in ("msgpack", "base58")}.items() <= constraints.items(), "run `make lock`"


def test_every_installation_by_pip_or_uv_demands_hashes_or_names_why_not() -> None:
    """torch and llama.cpp are pinned by version alone (decision 14); our wheel has its own hash, if one was given."""
    script = (FOLDER / "install.sh").read_text().replace("\\\n", " ")
    lines = [
        line
        for line in script.splitlines()
        if re.search(r'pip install |packages "|by_uv --', line) and '"$@"' not in line
    ]
    loose = [line.strip() for line in lines if "--require-hashes" not in line]
    assert len(lines) - len(loose) == 4
    assert [line.partition("constraints.txt")[2] for line in loose] == [
        "",
        '" torch transformers',
        '" torch transformers',
        '" llama-cpp-python gguf ;;',
    ]
    assert ["--only-binary :all:" in line for line in loose] == [False, True, True, False]  # llama.cpp is compiled


def test_the_override_stands_in_constraints() -> None:
    assert pins(FOLDER / "overrides.txt").items() <= pins(ROOT / "constraints.txt").items()


def test_shellcheck_finds_nothing() -> None:
    check = subprocess.run(
        [Path(sys.executable).parent / "shellcheck", FOLDER / "install.sh"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout


def nodes(node: Node) -> list[Node]:
    return [node, *(one for child in node.children for one in nodes(child))]


def test_the_powershell_script_parses_and_calls_what_it_defines() -> None:
    source = (FOLDER / "install.ps1").read_bytes()
    found = nodes(Parser(Language(tree_sitter_powershell.language())).parse(source).root_node)
    assert not [node.start_point for node in found if node.type == "ERROR" or node.is_missing]
    text = {
        kind: {node.text.decode() for node in found if node.type == kind and node.text}
        for kind in ("function_name", "command_name")
    }
    builtin = {"Set-StrictMode", "Join-Path", "Get-Command", "Test-Path", "New-Item", "Out-Null", "Set-Content",
               "Write-Output", "Remove-Item", "wsl.exe"}  # fmt: skip
    assert text["command_name"] <= text["function_name"] | builtin


def test_the_powershell_script_passes_options_that_install_sh_has() -> None:
    passed = set(re.findall(r"'(--[a-z-]+)'", (FOLDER / "install.ps1").read_text())) - {"--"}
    assert passed
    assert all(f"{option})" in (FOLDER / "install.sh").read_text() for option in passed)


def filled(name: str) -> str:
    return (FOLDER / name).read_text().replace("@PROGRAM@", "/bin/true").replace("@JOIN@", "http://host:8700#ab")


def test_the_plist_says_what_to_run() -> None:
    job = plistlib.loads(filled("launchd.plist").encode())
    assert job["ProgramArguments"] == ["/bin/true", "join", "http://host:8700#ab"]
    assert job["Umask"] == 0o077
    assert f"TimeoutStopSec={job['ExitTimeOut']}" in filled("user.service"), "as long as elsewhere to leave cleanly"


@pytest.mark.parametrize("name", ["system.service", "user.service"])
def test_systemd_signals_the_agent_alone_and_ends_every_process(name: str) -> None:
    assert {"KillMode=mixed", "KillSignal=SIGINT"} <= set(filled(name).splitlines())


@pytest.mark.parametrize("name", ["system.service", "user.service"])
def test_systemd_takes_the_unit(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed here")
    unit = tmp_path / "swarm-node.service"
    unit.write_text(filled(name))
    verify = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert verify.returncode == 0, verify.stderr
    assert "swarm-node.service" not in verify.stderr, verify.stderr


def test_the_compose_file_uses_settings_that_exist() -> None:
    composed = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    services = composed["services"]
    command = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", services["coordinator"]["command"][0])
    settings = [word.removeprefix("--set=") for word in shlex.split(command) if word.startswith("--set=")]
    assert len(settings) >= 5
    config = load(ROOT / "examples" / "demo.toml", settings)
    assert config.round.public_url == "http://coordinator:8700"
    (network,) = composed["networks"]["default"]["ipam"]["config"]
    proxy = ip_address(services["proxy"]["networks"]["default"]["ipv4_address"])
    assert [proxy in trusted for trusted in config.round.proxies] == [True]
    assert proxy in ip_network(network["subnet"])
    variables = set(services["proxy"]["environment"])
    assert variables == set(re.findall(r"\{\$(\w+):", (FOLDER / "proxy" / "Caddyfile").read_text()))
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {services[name]["build"]["target"] for name in ("coordinator", "node")} <= set(stages)


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return which volume lies where, but for files of the host's."""
    found = [mount.split(":") for mount in service.get("volumes", ())]
    return {volume: place for volume, place, *_ in found if volume[0] not in "/.$"}


def test_only_the_coordinator_holds_the_round_and_nodes_run_as_somebody_else() -> None:
    """Keys and the operator's token: whoever reads them is the operator."""
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    (directory,) = re.findall(r"--set=round\.directory=(\S+)", services["coordinator"]["command"][0])
    (private,) = [volume for volume, place in mounts(services["coordinator"]).items() if directory.startswith(place)]
    assert [name for name, service in services.items() if private in mounts(service)] == ["coordinator"]
    shared = mounts(services["coordinator"]).keys() & mounts(services["node"]).keys()
    (line,) = re.findall(r"swarm-coordinator init .*", services["coordinator"]["command"][0])
    assert [f" >{mounts(services['coordinator'])[one]}/" in line for one in shared] == [True]
    assert f"{shared.pop()}:/round:ro" in services["node"]["volumes"]
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    users = {stage.split()[2]: re.findall(r"^USER (\w+)", stage, re.MULTILINE) for stage in stages}
    assert {*users["node"]}.isdisjoint(users["coordinator"])
    assert all(users[stage] for stage in ("node", "coordinator"))
    uids = re.findall(r"useradd --uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert len(uids) == len(set(uids)) == 2


def test_lists_are_named_from_the_folder_in_which_they_are_used() -> None:
    """`COPY` puts them into /build; a stage that works elsewhere must say so."""
    folders: dict[str, str] = {}
    stage = ""
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if found := re.match(r"FROM (\S+) AS (\w+)$", line):
            stage = found[2]
            folders[stage] = folders.get(found[1], "/")
        elif found := re.match(r"WORKDIR (\S+)$", line):
            folders[stage] = found[1]
        for name in re.findall(r" -[cr] (\S+)", line):
            assert name.startswith("/build/") or folders[stage] == "/build", line


def test_the_container_copies_only_what_exists_and_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source.partition("/")[0] for line in copied for source in line.split() if source != "."}
    assert sources <= kept


@pytest.mark.parametrize(
    "name",
    [
        *("install.sh", "install.ps1", "system.service", "user.service", "launchd.plist", "compose.yaml"),
        *("../Dockerfile", "../README.md", "../docs/join.md", "../docs/operate.md"),
    ],
)
def test_whatever_starts_or_explains_a_node_names_its_port_and_how_to_close_it(name: str) -> None:
    said = (FOLDER / name).read_text()
    assert str(PORTS[0]) in said
    assert "no-share" in said


def test_the_firewall_lines_are_those_of_the_ports_on_which_nodes_listen() -> None:
    for name in ("install.sh", "install.ps1", "../docs/join.md"):
        said = re.findall(r"(?:allow|=|dport) ?(\d+)[:-](\d+)(?:/tcp| accept|\b)", (FOLDER / name).read_text())
        assert said
        assert {(int(first), int(last)) for first, last in said} == {(PORTS[0], PORTS[-1])}
