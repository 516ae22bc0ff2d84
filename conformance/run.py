"""PyTorch's own tests of torch.distributed against the backend `unisono`, beside gloo, under mpiexec.

python conformance/run.py                                      all of it, as `make conformance`; writes results.json
python conformance/run.py --only all_reduce --backend unisono --ranks 3 --tracebacks
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from report import (
    EXCEPTIONS,
    MOST_EXCEPTIONS,
    Results,
    behind_reference,
    listed_exceptions,
    print_behind,
    print_numbers,
    write_results,
)
from session import play
from suite import REFERENCE, load, tests_of

RESULTS = Path(__file__).parent / "results.json"
BACKENDS = [REFERENCE, "unisono"]
RANKS = [3, 4, 8]
"""8 because the suite has tests of groups that it does not run on fewer."""


def chosen_tests(only: list[str]) -> list[str]:
    """The names of the suite's tests, in its order; those alone that contain one of the given texts."""
    cases = tests_of(load(REFERENCE, RANKS[0]))
    names = sorted(name for name in dir(cases) if name.startswith("test_"))
    found = [name for name in names if not only or any(text in name for text in only)]
    if not found:
        raise typer.BadParameter(f"no test's name contains {' or '.join(only)}")
    return found


def run(
    only: Annotated[
        list[str] | None, typer.Option(help="Only tests whose name contains this; may be given again.")
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Which backend; may be given again.")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="On how many ranks; may be given again.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which a test counts as hung.")] = 120.0,
    profiling: Annotated[
        bool, typer.Option(help="Whether unisono's operations have to show in PyTorch's profiler.")
    ] = True,
    tracebacks: Annotated[bool, typer.Option(help="Print all that is known about each failure.")] = False,
) -> None:
    """Run PyTorch's own tests of torch.distributed against gloo and unisono."""
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the ranks are ended, too
    tests = chosen_tests(only or [])
    results: Results = {}
    for count in ranks or RANKS:
        for name in backend or BACKENDS:
            outcomes = results.setdefault((name, count), {})
            for test, outcome in play(name, count, tests, limit, profiling):
                outcomes[test] = outcome
                state = f"{name} {count} {outcome.state:8} {outcome.seconds:6.1f} s  {test}  {outcome.reason}"
                console.print(state, markup=False, highlight=False, soft_wrap=True)
                if tracebacks and not outcome.clean:
                    console.print(outcome.details, markup=False, highlight=False, soft_wrap=True)
    print_numbers(console, results)
    if profiling and not (only or backend or ranks):
        write_results(RESULTS, results)
    sys.exit(judge(console, results))


def judge(console: Console, results: Results) -> int:
    """Say which tests only the reference passes; an exit code of 1 if any of them is not a listed exception."""
    exceptions = listed_exceptions(EXCEPTIONS.read_text()) if EXCEPTIONS.exists() else {}
    behind = behind_reference(results, REFERENCE)
    unexpected = behind.keys() - exceptions.keys()
    print_behind(console, behind, exceptions)
    console.print(
        f"{len(behind)} tests pass on {REFERENCE} only, {len(behind) - len(unexpected)} of them listed as exceptions"
    )
    if len(exceptions) > MOST_EXCEPTIONS:
        console.print(f"{len(exceptions)} exceptions are listed; at most {MOST_EXCEPTIONS} may be")
        return 1
    return 1 if unexpected else 0


if __name__ == "__main__":
    typer.run(run)
