"""`echo-swarm-tinker`: serve Tinker's calls on this machine, with a round of the swarm behind them."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from protocol.errors import ConfigInvalid, SwarmError, named
from protocol.text.commands import lesson

if TYPE_CHECKING:
    from echo_swarm.tinker.lora import SharedBase
    from echo_swarm.tinker.service import ServedPolicy

FIRST_ANSWER_S = 10.0
"""The wait for the round when the server starts: its URL may be wrong."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(
    epilog=lesson(
        "echo-swarm-tinker http://127.0.0.1:8700 policy --key es-…",
        "set TINKER_BASE_URL and TINKER_API_KEY as it prints them, and run your program (docs/trainers.md).",
        "Exit codes: 1 failed, 2 an argument is wrong.",
    )
)
def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="The round's coordinator, with learner.external = true.")],
    policy: Annotated[
        Path, typer.Argument(metavar="POLICY", help="The folder that `swarm-coordinator export` wrote, in hub format.")
    ],
    key: Annotated[
        str, typer.Option(envvar="ECHO_SWARM_KEY", help="An API key of the round that may publish (--publishes).")
    ],
    host: Annotated[str, typer.Option(help="The address to listen at. The connection is not encrypted.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")] = 8800,
    name: Annotated[
        str, typer.Option(help="The name of the model for clients; default: POLICY as it is written.")
    ] = "",
    states: Annotated[Path, typer.Option(help="The folder for saved states.")] = Path("tinker-states"),
    device: Annotated[str, typer.Option(help="The device that trains; auto: CUDA if it is there.")] = "auto",
    adapter_rank: Annotated[
        int, typer.Option(min=0, help="The round's learner.lora_rank, if its versions are adapters; 0: whole weights.")
    ] = 0,
) -> None:
    """Serve Tinker's calls: this process trains LoRA adapters, and the round's nodes sample.

    Weights that a client saves for a sampler are published as the round's next version.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    for library in ("aiohttp.access", "httpx"):
        logging.getLogger(library).setLevel(logging.WARNING)
    if not (policy / "config.json").is_file():
        raise ConfigInvalid(f"{policy} has no config.json.", hint="Write the folder with `swarm-coordinator export`.")
    from echo_swarm.tinker.service import ServedPolicy  # with torch: after the arguments were checked

    asyncio.run(_run(url, key, ServedPolicy(policy, name or str(policy), adapter_rank), states, (host, port), device))


async def _run(url: str, key: str, policy: "ServedPolicy", states: Path, address: tuple[str, int], device: str) -> None:
    """Serve until the process is interrupted."""
    from aiohttp import web

    from echo_swarm.asynchronous import AsyncSwarm
    from echo_swarm.tinker.server import KEY_PREFIX, create_app
    from echo_swarm.tinker.service import TinkerService

    base = _load(policy.folder, device)
    async with AsyncSwarm(url, key, patience_s=FIRST_ANSWER_S) as swarm:
        if not (await swarm.budget()).may_publish:
            raise ConfigInvalid(
                "This key may not publish.", hint="Create one with `swarm-coordinator api-keys create … --publishes`."
            )
    async with AsyncSwarm(url, key) as swarm:
        service = TinkerService(swarm, base, policy, states)
        runner = web.AppRunner(create_app(service, key))
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, *address).start()
            except OSError as error:
                raise ConfigInvalid(
                    f"The server cannot listen at {address[0]}:{address[1]} ({error.strerror}).",
                    hint="Choose another --port.",
                ) from error
            here = runner.addresses[0]
            typer.echo(f"TINKER_BASE_URL=http://{here[0]}:{here[1]}")
            typer.echo(f"TINKER_API_KEY={KEY_PREFIX} and the API key of the swarm; the model is {policy.name}")
            sys.stdout.flush()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
            await service.close()


def _load(folder: Path, device: str) -> "SharedBase":
    """Load the policy, in the type in which it is stored."""
    import torch
    from transformers import AutoModelForCausalLM

    from echo_swarm.tinker.lora import SharedBase

    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    return SharedBase(model.to(place).eval())


def main() -> None:
    """Run the server; a named error becomes one line, and an interrupt none."""
    try:
        app()
    except SwarmError as error:
        typer.echo(f"echo-swarm-tinker: {named(error)}", err=True)
        sys.exit(2 if isinstance(error, ConfigInvalid) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
