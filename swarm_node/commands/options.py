"""Options shared by several commands of `swarm-node`, and the check of addresses."""

import os
import shlex
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from protocol.errors import ConfigInvalid, MalformedMessage
from protocol.limits import ADDRESSES_MAX, NAME_MAX_CHARS, PRICE_MAX_MICROS_PER_MTOK

if TYPE_CHECKING:
    from swarm_node.allowance.settings import Limits
    from swarm_node.engine.choose import EngineOptions


SECTIONS = {
    "Find a round": {
        "rounds": "List the rounds of directories: purpose, model, price, payouts.",
    },
    "Take part": {
        "join": "Take part in a round until it is finished; Ctrl-C leaves.",
        "doctor": "Check GPU, memory, disk, network, clock and engines.",
        "bench": "Measure the sampling speed of this machine.",
        "mirror": "Download every version and upload it to other nodes.",
    },
    "While it runs": {
        "status": "Show what the agent does, its earnings, and why it is idle.",
        "open": "Open the page of the running agent in a browser.",
        "pause": "Pause at once and free the memory.",
        "snooze": "Pause for some minutes.",
        "resume": "Continue after `pause` or `finish`.",
        "finish": "Accept no more work; stop when the current groups are done.",
        "leave": "Stop the agent now.",
        "move": "Finish the current groups, then continue with another round.",
        "limits": "Show or change this node's limits.",
    },
    "Credit and keys": {
        "earnings": "Show what this node and the owner's other nodes have earned.",
        "why": "Show the result of this node's leases with the evidence.",
        "appeal": "Appeal against what a fault or a ban took from this node.",
        "ledger": "Verify the ledger, save proofs, act as a witness.",
        "audit-learner": "Replay updates of the learner, and compare with the log.",
        "keys": "Manage the node's key and the owner's key.",
    },
    "For curators and coordinators": {
        "directory": "Publish a signed list of rounds.",
        "seed": "Serve a folder of chunks over libp2p; a coordinator starts it.",
    },
}
"""The commands by the task that they are for, as `--help` lists them."""


SENTENCE_CHARS = 300
"""The longest first sentence of a command's help."""


class NodeCommands(TyperGroup):
    """A program whose `--help` lists its commands by the task that they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one list for each section."""
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))


class WholeSentences(TyperGroup):
    """A group whose `--help` prints the first sentence of each command uncut; lines break instead."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, command.get_short_help_str(SENTENCE_CHARS))
            for name, command in commands.items()
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Device(StrEnum):
    """Device of the engine."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    XPU = "xpu"
    MPS = "mps"


class CardsPerEngine(StrEnum):
    """Number of graphics cards of one engine."""

    AUTO = "auto"
    ONE = "1"
    TWO = "2"
    FOUR = "4"
    EIGHT = "8"

    @property
    def number(self) -> int:
        """The number; 0 if it depends on the model."""
        return 0 if self is CardsPerEngine.AUTO else int(self)


class EngineDtype(StrEnum):
    """Precision of an engine."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    Q8_0 = "q8_0"
    FP8 = "fp8"
    EXACT = "exact"


class BestBy(StrEnum):
    """The aim by which the best round is chosen."""

    EARNINGS = "earnings"
    CAUSE = "cause"


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
DeviceOption = Annotated[
    Device, typer.Option(help="Device for sampling: cuda for NVIDIA and AMD, xpu for Intel, mps for Apple.")
]
DtypeOption = Annotated[
    EngineDtype,
    typer.Option(
        help="Precision of the weights; auto: float32 on a CPU and in llama. q8_0: llama only. fp8: vllm only. exact: "
        "float32 that an auditor repeats to the bit."
    ),
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
JoinTargets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOIN_STRING]...",
        help="The round's join string, http://host:port#fingerprint, or only its host, which you then confirm by a "
        "phrase of six words; several rounds in the order of your choice; by default those that were joined last.",
        show_default=False,
    ),
]
PhraseOption = Annotated[
    str, typer.Option(help="With a host: the six words of the round, from its operator; other words are refused.")
]
FingerprintOption = Annotated[
    str, typer.Option(help="With a host: the round's fingerprint, from its operator; another one is refused.")
]
NotifyOption = Annotated[
    str,
    typer.Option(
        envvar="SWARM_NOTIFY",
        help="Command that gets a message as JSON on its standard input when trouble lasts, when it is over, and for "
        "each payout, for example 'curl -fsS --data-binary @- https://ntfy.sh/my-nodes'.",
    ),
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
    bool,
    typer.Option(
        "--dry-run",
        help="Print demand, expected earnings and whether the model fits; then exit, with 1 if this "
        "machine cannot join any of the rounds now.",
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        help=f"Name of this node on the leaderboard, or name@team, of at most {NAME_MAX_CHARS} characters; kept for "
        "the next time. By default the name that was given last, else a generated nickname; '' returns to the nickname."
    ),
]
PageOption = Annotated[
    bool | None,
    typer.Option(
        "--page/--no-page",
        help="Serve the owner's page for `swarm-node open`, on this machine only; kept for the next time.",
        show_default=False,
    ),
]


def _price(text: str | int) -> int:
    """Parse the price; one in whole units is refused with the number to write."""
    with suppress(ValueError):
        return int(text)
    try:
        instead = f": --price {round(float(text) * 1_000_000)} asks {text} per million tokens"
    except (ValueError, OverflowError):
        instead = ""
    raise typer.BadParameter(f"{text!r} is not a whole number of millionths{instead}")


PriceOption = Annotated[
    int,
    typer.Option(
        parser=_price,
        metavar="<int>",
        help="Your price per million validated tokens, in millionths of the round's unit: 1000000 is 1.00.",
    ),
]

DirectoryPlaces = Annotated[
    list[str],
    typer.Option(
        "--directory",
        default_factory=list,
        show_default=False,
        help="A directory of rounds, 'URL#KEY' or 'FILE#KEY', from its curator; repeatable, and remembered.",
    ),
]
BestOption = Annotated[
    BestBy | None,
    typer.Option(help="Choose the round from directories: by expected earnings, or by where work is needed most."),
]
CauseOption = Annotated[str, typer.Option(help="With --best: only rounds that name these words in their purpose.")]
UnitOption = Annotated[str, typer.Option(help="With --best: only rounds that pay in this unit, such as EUR.")]
YesOption = Annotated[bool, typer.Option("--yes", help="With --best: join without a question.")]

HoursOption = Annotated[str | None, typer.Option(help="Working hours, such as 22:00-07:00; '': always.")]
ZoneOption = Annotated[str | None, typer.Option(help="Time zone of the hours, such as Europe/Berlin.")]
IdleOption = Annotated[float | None, typer.Option(help="Work only after this many minutes without user input.")]
BatteryOption = Annotated[
    bool | None, typer.Option("--on-battery/--not-on-battery", help="Allow work on battery power.")
]
PowerOption = Annotated[
    float | None, typer.Option(help="Maximum mean power of the GPU in watts, kept by pauses; 0: no limit.")
]
CelsiusOption = Annotated[
    float | None,
    typer.Option(help="Maximum temperature of a graphics card in °C; above it the card rests. 0: no limit."),
]
CardOption = Annotated[
    int | None, typer.Option("--card", min=0, help="Number of one graphics card, as `status` prints it.")
]
CardsOption = Annotated[
    str,
    typer.Option(
        help="Numbers of the graphics cards to use, such as 0,2; by default all. Each has an engine of its own, if the "
        "model fits on it."
    ),
]
CardsPerEngineOption = Annotated[
    CardsPerEngine,
    typer.Option(
        help="vllm: graphics cards that hold the model together; auto: one, or as many as the round's model needs."
    ),
]
VramOption = Annotated[float | None, typer.Option(help="Share of the GPU's memory for the engine, from above 0 to 1.")]
TurnsOption = Annotated[
    int | None,
    typer.Option(help="torch, llama: memory for finished turns of episodes in MiB, on the engine's device; 0: none."),
]
UploadOption = Annotated[float | None, typer.Option(help="Maximum upload to other nodes in GB per month; 0: no limit.")]
FloorOption = Annotated[
    int | None,
    typer.Option(
        help="Decline leases that pay less per million tokens, in millionths of the round's unit: 1000000 is 1.00."
    ),
]
BestPaidOption = Annotated[
    bool | None,
    typer.Option(
        "--best-paid-first/--listed-first",
        help="Of several rounds, work first for the one that pays the most per hour of work here, or for the first "
        "in your list.",
    ),
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
    cards_per_engine: CardsPerEngineOption = CardsPerEngine.AUTO

    def within(self, limits: "Limits | None" = None) -> "EngineOptions":
        """Return what `swarm_node.engine.choose` needs; the owner's limits decide threads and memory."""
        from swarm_node.engine.choose import EngineOptions

        chosen = EngineOptions(
            self.threads,
            self.device.value,
            self.dtype.value,
            self.gpu_layers,
            self.vllm_python,
            cards_per_engine=self.cards_per_engine.number,
        )
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
class BestOptions:
    """The options that choose a round from directories."""

    directory: DirectoryPlaces
    best: BestOption = None
    cause: CauseOption = ""
    unit: UnitOption = ""
    yes: YesOption = False

    def require_whole(self, join_string: str) -> None:
        """Refuse options of a choice without --best, and --best beside a join string."""
        if self.best and join_string:
            raise ConfigInvalid("--best chooses the round.", hint="Leave the join string out, or --best.")
        if not self.best and (self.directory or self.cause or self.unit or self.yes):
            raise ConfigInvalid(
                "--directory, --cause, --unit and --yes belong to the choice of a round.",
                hint="Add --best earnings or --best cause.",
            )


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
    celsius: CelsiusOption = None
    vram_share: VramOption = None
    turns_mib: TurnsOption = None
    upload_gb: UploadOption = None
    price_floor: FloorOption = None
    best_paid_first: BestPaidOption = None

    def typed(self) -> dict[str, Any]:
        """Return the limits that were typed."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def words_of(notify: str) -> tuple[str, ...]:
    """Split the owner's command as a shell does, and refuse a program that does not exist."""
    try:
        words = tuple(shlex.split(notify))
    except ValueError as error:
        raise ConfigInvalid(f"--notify {notify!r}: {error}.", hint="Close every quotation mark.") from error
    if words and shutil.which(words[0]) is None:
        raise ConfigInvalid(
            f"--notify: there is no program {words[0]}.",
            hint="Give a program of this machine with its arguments; write `sh -c '…'` for a line of the shell.",
        )
    return words


def check_settings(name: str, price: int, listen: str, advertise: str) -> None:
    """Refuse values that the coordinator would refuse, before anything is started."""
    from protocol.people.addresses import host_and_port, why_undialable
    from protocol.work.messages import Register

    if len(name) > NAME_MAX_CHARS:
        raise ConfigInvalid(
            f"--name: this name has {len(name)} characters. The maximum is {NAME_MAX_CHARS}.",
            hint="Give a shorter name.",
        )
    if not name.isprintable():
        raise ConfigInvalid(
            "--name: this name contains characters that cannot be shown.", hint="Use printable characters."
        )
    if not 0 <= price <= PRICE_MAX_MICROS_PER_MTOK:
        raise ConfigInvalid(
            f"--price {price}: a price is from 0 to {PRICE_MAX_MICROS_PER_MTOK} millionths of the round's unit.",
            hint="1000000 is 1 unit per million tokens.",
        )
    if listen:
        try:
            host_and_port(listen)
        except ConfigInvalid as error:
            raise ConfigInvalid(f"--listen: {error.message}", hint=error.hint) from None
    named = [address for address in advertise.split(",") if address]
    for address in named:
        if why := why_undialable(address):
            raise ConfigInvalid(
                f"--advertise {address}: other nodes cannot connect to this address: {why}.",
                hint="Give the host:port at which other nodes reach this one, such as 198.51.100.7:8703.",
            )
    try:
        Register.from_value({"name": name, "price_micros_per_mtok": price, "addresses": named, "agent": "echo-swarm"})
    except MalformedMessage:
        raise ConfigInvalid(
            f"--advertise {advertise}: a round accepts at most {ADDRESSES_MAX} addresses of the form host:port.",
            hint="Give fewer addresses, and IPv6 addresses without a zone.",
        ) from None
