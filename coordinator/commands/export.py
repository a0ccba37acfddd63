"""`swarm-coordinator export`: write the policy as a transformers folder or llama.cpp file, and upload it to the hub."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.options import ConfigFile, Settings
from coordinator.config import load
from protocol.errors import ConfigInvalid
from protocol.text.plain import counted


class Format(StrEnum):
    """Formats of an exported policy."""

    HUB = "hub"
    GGUF = "gguf"


class GgufDtype(StrEnum):
    """Types of a GGUF file's weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    Q8_0 = "q8_0"


def export(
    config_file: ConfigFile,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to create, or the GGUF file.")],
    settings: Settings,
    version: Annotated[int, typer.Option(min=0, help="A published version; 0: the newest policy.")] = 0,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only the LoRA adapter, in peft's format.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The version with the best evaluation.")] = False,
    form: Annotated[
        Format, typer.Option("--format", help="hub: a folder for transformers; gguf: a file for llama.cpp.")
    ] = Format.HUB,
    dtype: Annotated[
        GgufDtype, typer.Option(help="Type of a GGUF file's weights; auto: the policy's own.")
    ] = GgufDtype.AUTO,
    card: Annotated[bool, typer.Option("--card", help="Add a model card with the round's evidence.")] = False,
    repository: Annotated[
        str, typer.Option("--push", metavar="OWNER/NAME", help="Upload the folder, with its card, to the model hub.")
    ] = "",
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
) -> None:
    """Export the policy as a folder in hub format, which transformers can load, or as a GGUF file.

    By default, the newest version is exported, or the learner's last checkpoint if that is newer. An older version can
    be exported while its chunks are kept. --push uses the token of `hf auth login` or HF_TOKEN; if the upload fails,
    the folder stays.
    """
    from coordinator.base import logs
    from coordinator.commands.asking import launched
    from coordinator.learner import export as learner
    from coordinator.learner import hub

    if best and version:
        raise ConfigInvalid("--best and --version cannot be combined.", hint="Use one of them.")
    if adapter and form is Format.GGUF:
        raise ConfigInvalid("--adapter needs --format hub.", hint="Omit --adapter: a GGUF file has the adapter merged.")
    if dtype is not GgufDtype.AUTO and form is Format.HUB:
        raise ConfigInvalid("--dtype needs --format gguf.", hint="Omit --dtype: a folder has the policy's own type.")
    if form is Format.GGUF and (card or repository):
        raise ConfigInvalid("--card and --push need --format hub.", hint="Omit --format gguf.")
    logs.to_stderr(quiet=False)
    config = load(config_file, settings)
    if form is Format.GGUF:
        update = learner.export_gguf(config, target, version=version, best=best, dtype=dtype.value)
    else:
        update = learner.export(config, target, version=version, adapter=adapter, best=best)
    updates = counted(update, "update")
    typer.echo(f"{target}: the policy after {updates}")
    if card or repository:
        hub.write_card(launched(config), target, update)
    if repository:
        typer.echo(f"Uploading {target} to {repository} …", err=True)
        message = f"Echo Swarm: the policy after {updates}"
        typer.echo(f"pushed: {hub.push(target, repository, message, private=private)}")
