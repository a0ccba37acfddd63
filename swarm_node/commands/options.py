"""Options that several commands of `swarm-node` share, and what all of them do with addresses."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from protocol.errors import ConfigInvalid, MalformedMessage


class Device(StrEnum):
    """Where the engine may run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class EngineDtype(StrEnum):
    """What an engine may compute in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    Q8_0 = "q8_0"


class EngineName(StrEnum):
    """What may sample."""

    AUTO = "auto"
    LLAMA = "llama"
    TORCH = "torch"
    VLLM = "vllm"


DEFAULT_HOME = Path(os.environ.get("SWARM_HOME") or Path.home() / ".local" / "share" / "echo-swarm")
"""Of this user; the installer, run by root, names the service's."""

EngineOption = Annotated[EngineName, typer.Option(help="What samples; auto: the best that is installed and fits.")]
ThreadsOption = Annotated[
    int, typer.Option(min=0, help="CPU threads of the engine; 0: half of the cores, four at most, one beside a GPU.")
]
DeviceOption = Annotated[Device, typer.Option(help="Where to sample.")]
DtypeOption = Annotated[
    EngineDtype, typer.Option(help="Precision of the weights; auto: float32 on a CPU and in llama.")
]
GpuLayersOption = Annotated[int, typer.Option(min=-1, help="llama: layers on the GPU; -1: all, if it has one.")]
VllmPythonOption = Annotated[
    str, typer.Option(envvar="SWARM_VLLM_PYTHON", help="vllm: the Python of the environment that holds it.")
]
JoinText = Annotated[
    str, typer.Argument(metavar="JOIN_STRING", help="The round's join string: http://host:port#fingerprint.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Log only what goes wrong.")]
ListenOption = Annotated[
    str,
    typer.Option(
        help="Where other nodes may fetch chunks; port 0 takes any. By default every interface and the first free "
        "port of 8703-8710; this machine alone, if the coordinator is on it.",
        show_default=False,
    ),
]
ShareOption = Annotated[
    bool, typer.Option(help="Pass chunks on; without it, nothing listens and nobody is told of this node.")
]
MapPortOption = Annotated[
    bool | None,
    typer.Option(
        "--map-port/--no-map-port",
        help="Ask the router to forward the port (PCP, NAT-PMP, UPnP); by default if the coordinator is on the "
        "internet.",
    ),
]
AdvertiseOption = Annotated[
    str, typer.Option(help="The host:port others should dial, if not the listen address; several with commas.")
]
Home = Annotated[Path, typer.Option(help="The node's folder.")]

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Tell demand, earnings and whether the model fits, and stop there.")
]
PriceOption = Annotated[int, typer.Option(help="Your price: millionths of a unit per million validated tokens.")]

HoursOption = Annotated[str | None, typer.Option(help="When to work, like 22:00-07:00; '' is always.")]
ZoneOption = Annotated[str | None, typer.Option(help="Time zone of the hours, like Europe/Berlin.")]
IdleOption = Annotated[float | None, typer.Option(help="Work only when nobody used the machine for so many minutes.")]
BatteryOption = Annotated[
    bool | None, typer.Option("--on-battery/--not-on-battery", help="Whether to work on battery.")
]
PowerOption = Annotated[float | None, typer.Option(help="Mean watts of the GPU, kept by breaks; 0: no cap.")]
VramOption = Annotated[float | None, typer.Option(help="Share of the GPU's memory for the engine, above 0 up to 1.")]
UploadOption = Annotated[float | None, typer.Option(help="GB passed on to others in a month; 0: no cap.")]
FloorOption = Annotated[int | None, typer.Option(help="Decline leases that pay less per million tokens.")]


def given(**values: Any) -> dict[str, Any]:
    """The limits that were typed."""
    return {name: value for name, value in values.items() if value is not None}


def check_settings(name: str, price: int, listen: str, advertise: str) -> None:
    """Refuse what the coordinator would refuse, before anything is started."""
    from protocol.people.addresses import why_undialable
    from protocol.work.messages import Register

    named = [address for address in advertise.split(",") if address]
    for address in named:
        if why := why_undialable(address):
            raise ConfigInvalid(
                f"--advertise {address}: no other node can dial this address: {why}.",
                hint="Name the host:port at which others reach this node, such as 198.51.100.7:8703.",
            )
    for address in filter(None, (listen, *named)):
        try:
            Register.from_value(
                {"name": name, "price_micros_per_mtok": price, "addresses": [address], "agent": "echo-swarm"}
            )
        except MalformedMessage as error:
            raise ConfigInvalid(
                error.message, hint="A name has 40 characters at most, an address looks like host:port."
            ) from None
