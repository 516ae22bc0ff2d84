"""The command line: one file a command."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from unisono import witness
from unisono.cli import bench, data
from unisono.cli.accuracy import accuracy
from unisono.cli.draw import draw
from unisono.cli.lab import lab
from unisono.cli.layers import layers
from unisono.cli.pack import pack
from unisono.cli.train import train
from unisono.cli.tune import tune
from unisono.errors import UsageError
from unisono.launch import RANK_VARIABLES, ranks_started

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Data-parallel training of PyTorch models over MPI.",
)
app.command()(train)
app.command()(pack)
app.command()(draw)
app.command()(accuracy)
app.command()(tune)
app.command()(layers)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.command(context_settings={"allow_interspersed_args": False})(lab)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"unisono {version('unisono')}")
        raise typer.Exit


@app.callback()
def _commands(
    _: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Say it and end.")
    ] = False,
) -> None:
    """A callback makes commands of the functions even where there is one alone."""


INTERRUPTED = 130
"""Exit code after SIGINT; Typer returns it."""


def main() -> None:
    """Run a command; what was asked wrongly gets one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except (UsageError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
        if message:
            print(f"unisono: {' '.join(message.split())}", file=sys.stderr)
        code = 2
    except typer.Abort:
        code = INTERRUPTED
    if code == INTERRUPTED:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """End all ranks where this process is one of several: at a common end MPI would wait for the others for ever."""
    size = ranks_started(os.environ) or 1
    if size == 1:
        return
    number = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "?")
    witness.last_words(f"unisono: rank {number} of {size} was interrupted (SIGINT): all ranks end\n")
    if "unisono.mpi" in sys.modules:
        sys.modules["unisono.mpi"].MPI.COMM_WORLD.Abort(code)
    os._exit(code)
