"""The command line: a file for each command, or for commands of one subject."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from itertools import chain
from typing import Annotated, Any

import typer
from typer import Exit, Option
from typer.core import TyperGroup, TyperOption

from unisono.cli.bench import ablation, collectives, layers, memory, messages, networks, shuffle, storage
from unisono.cli.collective import price, simulate
from unisono.cli.draw import draw
from unisono.cli.elastic import join
from unisono.cli.measure import lab, probe, tune
from unisono.cli.pack import pack
from unisono.cli.papers import papers
from unisono.cli.plan import foresight, plan
from unisono.cli.ranks import INTERRUPTED, Shutdown
from unisono.cli.run import run
from unisono.cli.runs import accuracy, audit, evaluate, predict
from unisono.cli.train import sweep, train
from unisono.errors import UsageError
from unisono.launch import ranks_started


class CommandGroup(TyperGroup):
    """Group of commands; in its help and theirs, flags have no `<bool>` beside them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the group itself."""
        own = super().get_params(ctx)
        for parameter in chain(own, *(command.get_params(ctx) for command in self.commands.values())):
            if isinstance(parameter, TyperOption) and parameter.is_flag:
                parameter.metavar = ""
        return own


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Parallel training of PyTorch models over MPI, on CPUs.",
)

PANELS = {
    "Train": (train, join, run, sweep, pack),
    "Look at runs": (evaluate, predict, accuracy, audit),
    "Plan": (plan, price, simulate, draw, probe, tune, foresight),
    "Tools": (layers, lab, papers),
}
"""Groups of the commands in the help."""

for _panel, _functions in PANELS.items():
    for _function in _functions:
        _interspersed = _function not in (run, lab)  # what follows their program is the program's
        app.command(rich_help_panel=_panel, context_settings={"allow_interspersed_args": _interspersed})(_function)
_bench = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Benchmarks of Unisono and its peers.")
for _function in (collectives, messages, networks, shuffle, storage, ablation, memory):
    _bench.command()(_function)
app.add_typer(_bench, name="bench", rich_help_panel="Tools")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"unisono {version('unisono')}")
        raise Exit


@app.callback()
def _commands(
    _: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make the functions commands, even where there is only one: Typer needs a callback for that."""


@cache  # a process from which others are forked makes it for all of them
def command() -> CommandGroup:
    made = typer.main.get_command(app)
    assert isinstance(made, CommandGroup), "that of the app"
    return made


def main() -> None:
    """Run a command. A usage error or a path that fails is one line and exit code 2; lost output, exit code 1."""
    shutdown = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a process made by a standby took a file's place by a pipe
            sys.stdout.reconfigure(errors="replace")  # arrows and lines, where the locale has none
    if "" not in sys.path:
        sys.path.append("")  # what a user's network imports later lies in the current folder; Python's own come first
    try:
        shutdown = Shutdown()
        code = command()(standalone_mode=False)  # called itself, Typer puts a hook before ours
        print(end="", flush=True)
    except (UsageError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        if message:
            print(f"unisono: {' '.join(message.split())}", file=sys.stderr)
        code = 2
    except typer.Abort:
        code = INTERRUPTED
    except OSError as error:
        named = error.filename is not None
        if ranks_started(os.environ) is not None or not (named or error.errno in (errno.EPIPE, errno.ENOSPC)):
            raise  # a rank's error may be that of a network, say
        if error.errno != errno.EPIPE:
            print(f"unisono: {error.filename if named else 'output is lost'}: {error.strerror}", file=sys.stderr)
        if not named:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest at its end
        code = 2 if named else 1
    if shutdown is None:
        sys.exit(code)
    shutdown.exit(code or 0)
