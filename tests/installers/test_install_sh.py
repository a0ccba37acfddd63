"""install.sh at work, in a home of its own, with a small agent in place of the large one (`small_agent`)."""

import hashlib
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.installers.machine import SCRIPT, Machine, quick_uv
from tests.installers.small_agent import small_checkout, small_source, small_uv, small_wheel


def test_a_dry_run_says_everything_and_changes_nothing(machine: Machine) -> None:
    run = machine.run("--dry-run")
    assert run.returncode == 0, run.stderr
    assert "Engine:   none" in run.stdout
    assert str(machine.prefix) in run.stdout
    assert list(machine.home.iterdir()) == []


def test_a_dry_run_shows_the_service_file_that_it_would_write(machine: Machine) -> None:
    join = "http://127.0.0.1:8700#" + "ab" * 32
    dry = machine.run("--dry-run", "--service", join)
    assert dry.returncode == 0, dry.stderr
    assert f"  ExecStart={machine.home}/bin/swarm-node join {join}" in dry.stdout
    assert list(machine.home.iterdir()) == []


def run_bare(machine: Machine, script: Path, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a script without a folder of wheels."""
    command = machine.bare_command("--engine", "none", *options, script=script)
    return subprocess.run(command, env=machine.environment({}), capture_output=True, text=True, check=False, **more)


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["installation", "dry run"])
def test_a_dry_run_fails_where_the_installation_would_fail(machine: Machine, options: list[str]) -> None:
    alone = machine.home.parent / "install.sh"
    alone.write_text(SCRIPT.read_text())
    run = run_bare(machine, alone, *options)
    assert run.returncode == 1
    assert "No release of echo-swarm was found" in run.stderr
    assert "--find-links FOLDER" in run.stderr
    assert bool(list(machine.home.iterdir())) == (not options), "a dry run leaves nothing"


def test_a_dry_run_refuses_the_wheel_that_the_installation_would_refuse(machine: Machine) -> None:
    run = machine.run("--dry-run", "--sha256", "00" * 32)
    assert run.returncode == 1
    assert "has the SHA-256" in run.stderr
    assert list(machine.home.iterdir()) == []


def test_a_checkout_is_built_and_installed(machine: Machine, tmp_path: Path) -> None:
    script = small_checkout(tmp_path / "checkout", "3.0")
    before = sorted(path.name for path in script.parents[1].iterdir())
    dry = run_bare(machine, script, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert f"built from {script.parents[1]}" in dry.stdout
    assert list(machine.home.iterdir()) == []
    run = run_bare(machine, Path("installers/install.sh"), cwd=script.parents[1])
    assert run.returncode == 0, run.stderr
    assert machine.version() == "echo-swarm 3.0"
    assert sorted(path.name for path in script.parents[1].iterdir() if path.name != "__pycache__") == before
    assert machine.run().returncode == 0, "a folder of wheels replaces the checkout"
    assert machine.version() == "echo-swarm 1.0"


def test_a_checkout_that_cannot_be_built_fails_already_in_the_dry_run(machine: Machine, tmp_path: Path) -> None:
    script = small_checkout(tmp_path / "checkout", "3.0")
    (script.parents[1] / "backend.py").write_text("raise SystemExit('broken backend')\n")
    run = run_bare(machine, script, "--dry-run")
    assert run.returncode == 1
    assert "broken backend" in run.stderr
    assert list(machine.home.iterdir()) == []


def test_a_script_from_a_pipe_does_not_build_what_lies_in_the_current_folder(machine: Machine, tmp_path: Path) -> None:
    """The folder may be one in which others write."""
    script = small_checkout(tmp_path / "checkout", "3.0")
    command = machine.bare_command("--engine", "none", script=Path("-s"))
    command.insert(2, "--")
    run = subprocess.run(
        command,
        cwd=script.parent,
        input=script.read_text(),
        env=machine.environment({}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "newest version of echo-swarm" in run.stdout
    assert not machine.program.exists()


def test_install_update_and_uninstall(plain_machine: Machine) -> None:
    first = plain_machine.run()
    assert first.returncode == 0, first.stdout + first.stderr
    assert plain_machine.version() == "echo-swarm 1.0"
    program = plain_machine.program
    assert f"is not on your PATH. Next:  {program} mirror HOST" in first.stdout, "without an engine it cannot sample"
    assert "To sample, run this again with --engine torch." in first.stdout

    plain_machine.put("uv", quick_uv())  # two environments by venv would show nothing more
    small_wheel(plain_machine.wheels, "1.1")
    assert plain_machine.run().returncode == 0
    assert plain_machine.version() == "echo-swarm 1.1"
    assert plain_machine.versions() == 2, "the one before may still be running"

    keys = plain_machine.home / ".local" / "share" / "echo-swarm"
    if os.getuid() != 0:
        keys.mkdir(parents=True)
    dry = plain_machine.run("--uninstall", "--dry-run")
    assert f"Would remove {plain_machine.prefix}/" in dry.stdout
    assert "the service" not in dry.stdout, "there is none"
    assert os.getuid() == 0 or f"Would keep the node's keys and receipts in {keys}" in dry.stdout
    gone = plain_machine.run("--uninstall")
    assert gone.returncode == 0, gone.stderr
    assert not plain_machine.prefix.exists()
    assert not plain_machine.program.exists()
    assert os.getuid() == 0 or keys.exists()
    again = plain_machine.run("--uninstall")
    assert again.returncode == 1
    assert "Nothing is installed" in again.stderr


@pytest.mark.parametrize(("user", "home"), [("0", "/var/lib/echo-swarm"), ("1000", "")])
def test_commands_of_root_look_where_the_service_lives(machine: Machine, user: str, home: str) -> None:
    """`limits` and `status` of another home are confirmed, and mean nothing."""
    machine.put("id", f"echo {user}")
    assert machine.run().returncode == 0
    installed = machine.prefix / "current" / "bin" / "swarm-node"
    installed.write_text('#!/bin/sh\necho "$SWARM_HOME"\n')

    def found(**named: str) -> str:
        variables = machine.environment(named)
        return subprocess.run([machine.program], env=variables, capture_output=True, text=True, check=True).stdout

    assert found() == f"{home}\n"
    assert found(SWARM_HOME="/elsewhere") == "/elsewhere\n"


def test_modules_that_lie_where_root_stands_are_not_run(plain_machine: Machine, tmp_path: Path) -> None:
    """A user who may write to a folder in which root runs the installer, such as /tmp, must not become root."""
    lying, ran = tmp_path / "anybodys", tmp_path / "ran"
    lying.mkdir()
    for name in ("ensurepip", "venv", "pip", "zipfile", "hashlib", "pathlib"):
        (lying / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r} + chr(10))\n")
    wheel = next(plain_machine.wheels.iterdir())
    command = plain_machine.command("--engine", "none", "--sha256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    run = subprocess.run(
        command, cwd=lying, env=plain_machine.environment({}), capture_output=True, text=True, check=False
    )
    assert not ran.exists(), ran.read_text()
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_version_that_does_not_start_is_not_switched_to(machine: Machine) -> None:
    assert machine.run().returncode == 0
    small_wheel(machine.wheels, "2.0", exit_code=3)
    run = machine.run()
    assert run.returncode == 1
    assert "The previously installed version, if any, is unchanged" in run.stderr
    assert machine.version() == "echo-swarm 1.0"


def test_a_swapped_wheel_is_refused_by_its_hash(machine: Machine) -> None:
    wheel = next(machine.wheels.iterdir())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    wheel.write_bytes(small_wheel(machine.home / "evil", "1.0", exit_code=1).read_bytes())
    run = machine.run("--sha256", digest)
    assert run.returncode == 1
    assert digest in run.stderr
    assert not machine.program.exists()


def test_killed_in_the_middle_it_leaves_the_old_version_and_goes_on_when_run_again(machine: Machine) -> None:
    assert machine.run().returncode == 0
    small_wheel(machine.wheels, "1.1")
    command = machine.command("--engine", "none")
    with subprocess.Popen(
        command, env=machine.environment({}), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as victim:
        assert victim.stdout is not None
        for line in victim.stdout:
            if "hash" in line:
                break
        os.killpg(victim.pid, signal.SIGKILL)
    assert machine.version() == "echo-swarm 1.0"
    assert (machine.prefix / "lock").exists(), "killed before it could tidy up"
    assert machine.run().returncode == 0
    assert machine.version() == "echo-swarm 1.1"
    assert machine.versions() == 2, "what the killed one left is gone"


def test_two_installers_at_once(machine: Machine) -> None:
    lock = machine.prefix / "lock"
    lock.mkdir(parents=True)
    (lock / "pid").write_text(str(os.getpid()))
    run = machine.run()
    assert run.returncode == 1
    assert "Another installation" in run.stderr
    assert lock.exists()


def test_no_network_is_told_with_the_next_step(machine: Machine) -> None:
    run = machine.run("--version", "7.0")
    assert run.returncode == 1
    assert "7.0" in run.stderr
    assert "run this again" in run.stderr
    assert not machine.program.exists()


def test_a_full_disk_is_told_before_anything_is_written(machine: Machine) -> None:
    machine.put("df", "echo head\necho none 1000 990 10240 99% /")
    run = machine.run()
    assert run.returncode == 1
    assert "10 MB free" in run.stderr
    assert not machine.prefix.exists()


def test_without_a_python(machine: Machine) -> None:
    (machine.tools / "python3").unlink()
    run = machine.run()
    assert run.returncode == 1
    assert "Python 3.11, 3.12 or 3.13 is needed" in run.stderr
    assert "apt-get install python3" in run.stderr


def test_a_python_that_is_too_old(machine: Machine) -> None:
    machine.put("python3", "exit 1")
    assert "but was not found" in machine.run().stderr
    named = machine.run("--python", str(machine.tools / "python3"))
    assert "is not Python 3.11, 3.12 or 3.13" in named.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "cuda"], "--engine must be auto"),
        (["--frobnicate"], "unknown option --frobnicate"),
        (["--purge"], "--purge needs --uninstall"),
        (["--service", "http://h:1#ab\nExecStartPre=/bin/rm"], "is not a valid join string"),
        (["--service", "http://h:1#$(reboot)"], "is not a valid join string"),
    ],
)
def test_wrong_usage_ends_with_2(machine: Machine, options: list[str], said: str) -> None:
    run = machine.run(*options)
    assert run.returncode == 2
    assert said in run.stderr


@pytest.mark.parametrize(
    ("memory_mb", "engine"), [("24564", "vllm"), ("8188", "torch")], ids=["a large card", "a small card"]
)
def test_the_engine_follows_the_card(machine: Machine, memory_mb: str, engine: str) -> None:
    machine.put("nvidia-smi", f'case "$*" in *memory*) echo {memory_mb} ;; *) echo "NVIDIA Test" ;; esac')
    run = machine.run("--engine", "auto", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert run.returncode == 0, run.stderr
    assert f"Engine:   {engine} (NVIDIA Test has {memory_mb} MB" in run.stdout


X86 = '[ "$1" = -m ] && echo x86_64 || echo Linux'


@pytest.mark.parametrize(
    ("capability", "engine"), [("6.1", "torch"), ("7.0", "torch"), ("7.5", "torch"), ("12.0", "vllm")]
)
def test_cards_that_cuda_13_or_vllm_no_longer_support_get_torch_and_the_oldest_an_older_build(
    machine: Machine, capability: str, engine: str
) -> None:
    machine.put("uname", X86)
    answers = f"*memory*) echo 32768 ;; *compute_cap*) echo {capability} ;; *) echo 'NVIDIA Test' ;;"
    machine.put("nvidia-smi", f'case "$*" in {answers} esac')
    run = machine.run("--engine", "auto", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert run.returncode == 0, run.stderr
    assert f"Engine:   {engine} (" in run.stdout
    assert ("torch's build for CUDA 12.6" in run.stdout) is (capability in ("6.1", "7.0"))
    assert ("refuses bfloat16" in run.stdout) is (capability == "7.5")
    refused = machine.run("--engine", "vllm", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert ("older than Turing" in refused.stderr) is (capability in ("6.1", "7.0"))


def test_a_card_that_no_build_of_torch_supports_gets_the_build_for_the_cpu(machine: Machine) -> None:
    """The build for CUDA 12.6 has code from Maxwell on: on Kepler, the first step of the engine would fail."""
    machine.put("uname", X86)
    machine.put(
        "nvidia-smi", 'case "$*" in *memory*) echo 24576 ;; *compute_cap*) echo 3.7 ;; *) echo Tesla K80 ;; esac'
    )
    run = machine.run("--engine", "auto", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert run.returncode == 0, run.stderr
    assert "Engine:   torch (no build of torch supports Tesla K80 any more, so the CPU is used" in run.stdout
    assert "CUDA 12.6" not in run.stdout
    refused = machine.run("--engine", "vllm", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert "vLLM does not support Tesla K80" in refused.stderr


MISMATCH = """echo 'Failed to initialize NVML: Driver/library version mismatch'
echo 'NVML library version: 580.95'
exit 18"""


def test_what_nvidia_smi_prints_when_it_fails_is_no_card(machine: Machine, tmp_path: Path) -> None:
    """The program prints errors to standard output. A loaded driver means that there is a card all the same."""
    machine.put("uname", X86)
    machine.put("nvidia-smi", MISMATCH)
    more = kernel_card(tmp_path, "0x1a03", sensors=False)
    run = machine.run("--engine", "auto", "--dry-run", **more)
    assert run.returncode == 0, run.stderr
    assert "Engine:   torch (no GPU detected" in run.stdout
    (tmp_path / "dev" / "dxg").touch()  # the card of Windows in WSL 2
    run = machine.run("--engine", "auto", "--dry-run", **more)
    assert run.returncode == 0, run.stderr
    assert "nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch" in run.stdout
    assert "Restart the machine" in run.stdout
    assert "Engine:   torch (an NVIDIA card has 0 MB" in run.stdout


@pytest.mark.slow
def test_a_machine_without_a_card_gets_torch_without_cuda(machine: Machine, tmp_path: Path) -> None:
    machine.put("uname", X86)
    small_wheel(machine.wheels, "1.0", uv_lock=small_uv(tmp_path / "tools-of-pip"))
    options = ("--engine", "torch")
    more = {"ECHO_SWARM_NEEDED_MB": "1", "PIP_FIND_LINKS": str(tmp_path / "tools-of-pip")}
    run = machine.run(*options, **more)
    assert run.returncode == 0, run.stderr
    assert "Download: about 0.4 GB" in run.stdout
    said = (machine.home / "uv-arguments").read_text()
    assert "--torch-backend cpu" in said
    assert said.endswith(" torch transformers\n")
    wrong = machine.run(*options, **more, FAKE_CUDA="13")
    assert wrong.returncode == 1, "a build with CUDA is not accepted"
    assert machine.version() == "echo-swarm 1.0"


def test_uv_installs_by_pips_configuration_and_pip_where_uv_fails(machine: Machine, tmp_path: Path) -> None:
    """uv reads no configuration of pip; and of its own it must read none that lies where root stands."""
    tools = tmp_path / "tools-of-pip"
    small_wheel(machine.wheels, "1.0", uv_lock=small_uv(tools))
    certificates = tmp_path / "own ca.pem"
    certificates.touch()
    constraint = tmp_path / "constraint.txt"
    constraint.touch()
    more = {
        "PIP_FIND_LINKS": f"{tools} {tmp_path}",
        "PIP_INDEX_URL": "https://index.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://a.example https://b.example",
        "PIP_CERT": str(certificates),
        "PIP_CONSTRAINT": str(constraint),
    }
    run = machine.run(**more)
    assert run.returncode == 0, run.stderr
    given = dict(line.split("=", 1) for line in (machine.home / "uv-variables").read_text().splitlines())
    assert given.pop("UV_CACHE_DIR", "") == f"{machine.prefix}/cache", "an uninstall removes it, too"
    assert given.pop("UV_COMPILE_BYTECODE", "") == ("1" if os.getuid() == 0 else "")
    assert given == {
        "SSL_CERT_FILE": str(certificates),
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_INDEX": "https://a.example https://b.example",
        "UV_FIND_LINKS": f"{tools},{tmp_path},{machine.wheels}",
        "UV_CONSTRAINT": str(constraint),
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_NO_CONFIG": "1",
    }
    words = (machine.home / "uv-arguments").read_text().split()
    assert "--no-index" in words, words
    small_wheel(machine.wheels, "1.1", uv_lock=small_uv(tools), node_lock=small_source(machine.wheels))
    again = machine.run(**more, FAKE_UV_FAILS="yes")
    assert again.returncode == 0, again.stderr
    assert machine.version() == "echo-swarm 1.1"


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        ("torch", "2.9 GB"),
        pytest.param("none", "0.1 GB", marks=pytest.mark.slow),
        pytest.param("vllm", "4.1 GB", marks=pytest.mark.slow),
    ],
)
def test_the_size_of_the_download_is_told_for_the_engine(machine: Machine, engine: str, size: str) -> None:
    machine.put("nvidia-smi", LARGE_CARD)
    machine.put("uname", X86)
    run = machine.run("--engine", engine, "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert f"Download: about {size}" in run.stdout, run.stderr


@pytest.mark.slow
def test_the_sizes_of_the_other_engines_are_told_where_they_can_be_used(machine: Machine) -> None:
    machine.put("uname", X86)
    run = machine.run("--engine", "none", "--dry-run")
    assert "about 0.1 GB; with another --engine: torch 0.4 GB, llama 0.2 GB\n" in run.stdout, run.stderr
    machine.put("nvidia-smi", LARGE_CARD)
    run = machine.run("--engine", "vllm", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert "about 4.1 GB; with another --engine: torch 2.9 GB, llama 0.2 GB, none 0.1 GB\n" in run.stdout, run.stderr


SLOW_UV = """
echo '  Downloading https://example.org/packages/big-1.0.whl (2.5 GB)'
until [ -e "$HOME/go" ]; do sleep 0.1; done
"""
"""A step that goes on when the test has seen its progress."""


@pytest.mark.parametrize("terminal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_long_step_shows_what_is_downloaded_and_leaves_nothing_running(machine: Machine, *, terminal: bool) -> None:
    machine.put("uv", SLOW_UV + quick_uv())
    ours, theirs = os.openpty() if terminal else os.pipe()
    variables = machine.environment({"ECHO_SWARM_PROGRESS_S": "1"})
    with subprocess.Popen(machine.command("--engine", "none"), env=variables, stdout=theirs) as installer:
        os.close(theirs)
        shown = b""
        while b" s  Downloading big-1.0.whl (2.5 GB)" not in shown:
            shown += os.read(ours, 4096)
        (machine.home / "go").touch()
        with suppress(OSError):  # a terminal whose last program has ended
            while part := os.read(ours, 4096):  # the end comes only when no child holds the output any more
                shown += part
    os.close(ours)
    assert installer.returncode == 0, shown
    assert (b"\r" in shown.replace(b"\r\n", b"")) == terminal
    assert b"Installed: echo-swarm 1.0." in shown


LARGE_CARD = 'case "$*" in *memory*) echo 24564 ;; *) echo "NVIDIA Test" ;; esac'


def old_driver(machine: Machine, version: str = "550.54.14") -> None:
    answers = f"*memory*) echo 24564 ;; *driver*) echo '{version}' ;; *) echo 'NVIDIA Test' ;;"
    machine.put("nvidia-smi", f'case "$*" in {answers} esac')


@pytest.mark.parametrize("engine", ["auto", "vllm"])
def test_a_driver_too_old_for_cuda_is_refused_before_anything_is_changed(machine: Machine, engine: str) -> None:
    old_driver(machine)
    run = machine.run("--engine", engine)
    assert run.returncode == 1
    assert "NVIDIA driver 550.54.14 is too old: torch and vLLM need 580 or newer" in run.stderr
    assert "--engine torch" in run.stderr
    assert not machine.prefix.exists()


@pytest.mark.slow
def test_torch_is_installed_with_an_old_driver_where_it_was_asked_for(machine: Machine) -> None:
    old_driver(machine)
    run = machine.run("--engine", "torch", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert run.returncode == 0, run.stderr
    assert "The CPU will be used until you update it" in run.stdout


@pytest.mark.parametrize("version", ["580.65.06", pytest.param("[N/A]", marks=pytest.mark.slow)])
def test_a_driver_that_is_new_enough_or_unknown_stands_in_no_way(machine: Machine, version: str) -> None:
    old_driver(machine, version)
    run = machine.run("--engine", "auto", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert run.returncode == 0, run.stderr
    assert "Engine:   vllm" in run.stdout


@pytest.mark.parametrize(
    ("processor", "glibc", "wanted"), [("x86_64", "2.28", "2.31"), ("aarch64", "2.31", "2.34")], ids=["x86-64", "ARM"]
)
def test_where_vllm_has_no_packages_torch_samples_and_vllm_is_refused(
    machine: Machine, processor: str, glibc: str, wanted: str
) -> None:
    machine.put("nvidia-smi", LARGE_CARD)
    machine.put("ldd", f'echo "ldd (GNU libc) {glibc}"')
    machine.put("uname", f'[ "$1" = -m ] && echo {processor} || echo Linux')
    run = machine.run("--engine", "auto", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert run.returncode == 0, run.stderr
    assert f"Engine:   torch (vLLM needs glibc {wanted} on {processor}; this system has glibc {glibc})" in run.stdout
    refused = machine.run("--engine", "vllm")
    assert refused.returncode == 1
    assert f"glibc {wanted}" in refused.stderr
    assert "--engine torch" in refused.stderr
    assert not machine.prefix.exists()


def test_a_system_older_than_every_package_is_refused(machine: Machine) -> None:
    machine.put("ldd", 'echo "ldd (GNU libc) 2.17"')
    run = machine.run()
    assert run.returncode == 1
    assert "glibc 2.28" in run.stderr
    assert not machine.prefix.exists()


def test_vllm_without_a_card_is_refused(machine: Machine) -> None:
    run = machine.run("--engine", "vllm")
    assert run.returncode == 1
    assert "nvidia-smi reports none" in run.stderr


def kernel_card(folder: Path, vendor: str, *, sensors: bool) -> dict[str, str]:
    """Write the kernel's files of a graphics card; return the variables that name their folders."""
    device = folder / "sys" / "class" / "drm" / "card0" / "device"
    (device / "hwmon" / "hwmon3").mkdir(parents=True) if sensors else device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (folder / "dev").mkdir()
    return {"ECHO_SWARM_SYS": str(folder / "sys"), "ECHO_SWARM_DEV": str(folder / "dev"), "ECHO_SWARM_NEEDED_MB": "1"}


def test_an_amd_card_gets_torch_for_rocm_and_another_build_is_not_accepted(machine: Machine, tmp_path: Path) -> None:
    machine.put("uname", X86)
    small_wheel(machine.wheels, "1.0", uv_lock=small_uv(tmp_path / "tools-of-pip"))
    more = kernel_card(tmp_path, "0x1002", sensors=True) | {"PIP_FIND_LINKS": str(tmp_path / "tools-of-pip")}
    (tmp_path / "dev" / "kfd").touch()
    run = machine.run("--engine", "auto", **more, FAKE_HIP="'7.2'")
    assert run.returncode == 0, run.stderr
    assert "Engine:   torch (for an AMD card: torch's build for ROCm; it was never tried on one)" in run.stdout
    assert "Download: about 6 GB" in run.stdout
    assert "--torch-backend rocm7.2" in (machine.home / "uv-arguments").read_text()
    wrong = machine.run("--engine", "auto", **more)
    assert wrong.returncode == 1
    assert "this torch is not built for ROCm" in wrong.stderr


@pytest.mark.parametrize(
    ("vendor", "sensors", "kfd", "said"),
    [
        ("0x1002", True, False, "an AMD card is there, but not /dev/kfd: install AMD's amdgpu driver"),
        ("0x8086", True, False, "for an Intel card: torch's build for XPU"),
        ("0x8086", False, False, "no GPU detected"),
        ("0x1a03", True, True, "no GPU detected"),
    ],
    ids=["AMD without ROCm", "Intel", "an Intel processor", "a server's console"],
)
def test_the_engine_of_a_card_that_is_not_nvidias_is_explained(
    machine: Machine, tmp_path: Path, vendor: str, sensors: bool, kfd: bool, said: str
) -> None:
    machine.put("uname", X86)
    more = kernel_card(tmp_path, vendor, sensors=sensors)
    if kfd:
        (tmp_path / "dev" / "kfd").touch()
    run = machine.run("--engine", "auto", "--dry-run", **more)
    assert run.returncode == 0, run.stderr
    assert f"Engine:   torch ({said}" in run.stdout


def test_llama_is_compiled_for_a_card_whose_compiler_is_there(machine: Machine, tmp_path: Path) -> None:
    machine.put("uname", X86)
    machine.put("c++", "exit 0")
    more = kernel_card(tmp_path, "0x1002", sensors=True)
    without = machine.run("--engine", "llama", "--dry-run", **more)
    assert "llama.cpp will use the CPU" in without.stdout, without.stderr
    assert "apt-get install glslc libvulkan-dev" in without.stdout
    machine.put("glslc", "exit 0")
    assert "compiled for Vulkan" in machine.run("--engine", "llama", "--dry-run", **more).stdout
    machine.put("hipcc", "exit 0")
    assert "compiled for ROCm" in machine.run("--engine", "llama", "--dry-run", **more).stdout


@pytest.mark.parametrize(("tools", "engine"), [(("cmake", "c++"), "llama"), ((), "torch")], ids=["tools", "none"])
def test_a_mac_uses_metal_with_and_without_a_compiler(machine: Machine, tools: tuple[str, ...], engine: str) -> None:
    machine.put("uname", '[ "$1" = -m ] && echo arm64 || echo Darwin')
    for tool in tools:
        machine.put(tool, "exit 0")
    run = machine.run("--engine", "auto", "--dry-run", ECHO_SWARM_NEEDED_MB="1")
    assert f"Engine:   {engine} (for Apple's Metal" in run.stdout, run.stderr
