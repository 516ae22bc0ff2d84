"""`unisono foresight`: errors of sealed predictions, over all runs of a ledger."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from unisono.errors import UsageError


def foresight(
    ledger: Annotated[Path, typer.Argument(help="Ledger of runs.")] = Path("runs/ledger.jsonl"),
    by: Annotated[
        str, typer.Option(help="Label that groups runs: version, rule, model, machine, ranks, ..., or one of your own.")
    ] = "version",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    chart: Annotated[Path | None, typer.Option(help="Output file for a chart of calibration, SVG.")] = None,
) -> None:
    """Compare the predicted steps of runs with the measured ones: errors, coverage of the intervals, worst runs."""
    from unisono.foresight.calibration import check_label
    from unisono.foresight.ledger import changed_seals, read
    from unisono.foresight.report import ledger_data, ledger_lines

    entries, complaints = read(ledger)
    complaints += changed_seals(ledger, entries)
    check_label(entries, by)
    if chart is not None:
        from unisono.view.chart import write_picture
        from unisono.view.predictions import draw_calibration

        write_picture(chart, draw_calibration(entries, by), "--chart")
    if as_json:
        print(json.dumps(ledger_data(entries, complaints, by), indent=1))
        return
    for line in complaints:
        print(f"unisono: {line}", file=sys.stderr)
    if not entries:
        raise UsageError(f"{ledger} has no runs: unisono train adds one at its end")
    print("\n".join(ledger_lines(entries, by)))
