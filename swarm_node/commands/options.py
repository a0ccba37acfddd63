"""Options shared by several commands of `swarm-node`, and the check of addresses."""

import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protocol.errors import ConfigInvalid, MalformedMessage

if TYPE_CHECKING:
    from swarm_node.allowance.settings import Limits
    from swarm_node.engine.choose import EngineOptions


class Device(StrEnum):
    """Device of the engine."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class EngineDtype(StrEnum):
    """Precision of an engine."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    Q8_0 = "q8_0"


class EngineName(StrEnum):
    """Name of a sampling engine."""

    AUTO = "auto"
    LLAMA = "llama"
    TORCH = "torch"
    VLLM = "vllm"


DEFAULT_HOME = Path(os.environ.get("SWARM_HOME") or Path.home() / ".local" / "share" / "echo-swarm")
"""Home of this user; the installer, run by root, sets the service's home."""

EngineOption = Annotated[EngineName, typer.Option(help="Sampling engine; auto: the best installed engine that fits.")]
ThreadsOption = Annotated[
    int, typer.Option(min=0, help="CPU threads of the engine; 0: half of the cores, at most 4; 1 with a GPU.")
]
DeviceOption = Annotated[Device, typer.Option(help="Device for sampling.")]
DtypeOption = Annotated[
    EngineDtype, typer.Option(help="Precision of the weights; auto: float32 on a CPU and in llama.")
]
GpuLayersOption = Annotated[int, typer.Option(min=-1, help="llama: number of layers on the GPU; -1: all.")]
VllmPythonOption = Annotated[
    str, typer.Option(envvar="SWARM_VLLM_PYTHON", help="vllm: path of the Python interpreter that has vLLM installed.")
]
JoinText = Annotated[
    str,
    typer.Argument(
        metavar="JOIN_STRING",
        help="The round's join string, http://host:port#fingerprint; by default the round that was joined last.",
    ),
]
JoinTarget = Annotated[
    str,
    typer.Argument(
        metavar="JOIN_STRING",
        help="The round's join string, http://host:port#fingerprint, or only its host, which you then confirm by a "
        "phrase of six words; by default the round that was joined last.",
    ),
]
PhraseOption = Annotated[
    str, typer.Option(help="With a host: the six words of the round, from its operator; other words are refused.")
]
FingerprintOption = Annotated[
    str, typer.Option(help="With a host: the round's fingerprint, from its operator; another one is refused.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings and errors only.")]
ListenOption = Annotated[
    str,
    typer.Option(
        help="Address (host:port) at which other nodes download chunks; port 0: any free port. By default all "
        "interfaces and the first free port of 8703-8710; only this machine if the coordinator runs on it.",
        show_default=False,
    ),
]
ShareOption = Annotated[
    bool,
    typer.Option(help="Upload chunks to other nodes. With --no-share the node opens no port and publishes no address."),
]
MapPortOption = Annotated[
    bool | None,
    typer.Option(
        "--map-port/--no-map-port",
        help="Ask the router to forward the port (PCP, NAT-PMP, UPnP); by default only if the coordinator is on the "
        "internet.",
    ),
]
AdvertiseOption = Annotated[
    str,
    typer.Option(help="Address (host:port) that other nodes connect to, if it differs from --listen; comma-separated."),
]
Home = Annotated[Path, typer.Option(help="The node's folder.")]
HomeOfRound = Annotated[Path, typer.Option(help="The node's folder, which names the round without a join string.")]

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print demand, expected earnings and whether the model fits; then exit.")
]
NameOption = Annotated[
    str | None,
    typer.Option(
        help="Name of this node on the leaderboard, or name@team; kept for the next time. By default the name that was "
        "given last, else a generated nickname; '' returns to the nickname."
    ),
]
PriceOption = Annotated[
    int, typer.Option(help="Your price per million validated tokens, in millionths of the round's unit.")
]

HoursOption = Annotated[str | None, typer.Option(help="Working hours, such as 22:00-07:00; '': always.")]
ZoneOption = Annotated[str | None, typer.Option(help="Time zone of the hours, such as Europe/Berlin.")]
IdleOption = Annotated[float | None, typer.Option(help="Work only after this many minutes without user input.")]
BatteryOption = Annotated[
    bool | None, typer.Option("--on-battery/--not-on-battery", help="Allow work on battery power.")
]
PowerOption = Annotated[
    float | None, typer.Option(help="Maximum mean power of the GPU in watts, kept by pauses; 0: no limit.")
]
VramOption = Annotated[float | None, typer.Option(help="Share of the GPU's memory for the engine, from above 0 to 1.")]
TurnsOption = Annotated[
    int | None,
    typer.Option(help="torch, llama: memory for finished turns of episodes in MiB, on the engine's device; 0: none."),
]
UploadOption = Annotated[float | None, typer.Option(help="Maximum upload to other nodes in GB per month; 0: no limit.")]
FloorOption = Annotated[
    int | None, typer.Option(help="Decline leases that pay less per million tokens, in millionths of the round's unit.")
]


@dataclass(frozen=True)
class EngineChoice:
    """The options that say which engine samples, and where."""

    engine: EngineOption = EngineName.AUTO
    threads: ThreadsOption = 0
    device: DeviceOption = Device.AUTO
    dtype: DtypeOption = EngineDtype.AUTO
    gpu_layers: GpuLayersOption = -1
    vllm_python: VllmPythonOption = ""

    def within(self, limits: "Limits | None" = None) -> "EngineOptions":
        """Return what `swarm_node.engine.choose` needs; the owner's limits decide threads and memory."""
        from swarm_node.engine.choose import EngineOptions

        chosen = EngineOptions(self.threads, self.device.value, self.dtype.value, self.gpu_layers, self.vllm_python)
        if limits is None:
            return chosen
        threads = limits.threads or self.threads
        return chosen._replace(threads=threads, vram_share=limits.vram_share, turns_mib=limits.turns_mib)


@dataclass(frozen=True)
class ConfirmOptions:
    """The options that confirm the round of a host."""

    phrase: PhraseOption = ""
    fingerprint: FingerprintOption = ""


@dataclass(frozen=True)
class ReachOptions:
    """The options that say how other nodes reach this one."""

    listen: ListenOption = ""
    advertise: AdvertiseOption = ""
    share: ShareOption = True
    map_port: MapPortOption = None


@dataclass(frozen=True)
class LimitOptions:
    """The owner's limits; None leaves a limit as it is in limits.toml."""

    hours: HoursOption = None
    zone: ZoneOption = None
    idle_minutes: IdleOption = None
    on_battery: BatteryOption = None
    power_watts: PowerOption = None
    vram_share: VramOption = None
    turns_mib: TurnsOption = None
    upload_gb: UploadOption = None
    price_floor: FloorOption = None

    def typed(self) -> dict[str, Any]:
        """Return the limits that were typed."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def check_settings(name: str, price: int, listen: str, advertise: str) -> None:
    """Refuse values that the coordinator would refuse, before anything is started."""
    from protocol.people.addresses import why_undialable
    from protocol.work.messages import Register

    named = [address for address in advertise.split(",") if address]
    for address in named:
        if why := why_undialable(address):
            raise ConfigInvalid(
                f"--advertise {address}: other nodes cannot connect to this address: {why}.",
                hint="Give the host:port at which other nodes reach this one, such as 198.51.100.7:8703.",
            )
    for address in filter(None, (listen, *named)):
        try:
            Register.from_value(
                {"name": name, "price_micros_per_mtok": price, "addresses": [address], "agent": "echo-swarm"}
            )
        except MalformedMessage as error:
            raise ConfigInvalid(
                error.message, hint="Use at most 40 characters for a name, and host:port for an address."
            ) from None
