"""Changes of a planned run that are asked for as "what if": of its machine, its wire or its rule.

    bandwidth=2x             the machine      plan/what_if.py
    wire=bfloat16            number format between nodes, of all rules
    rule=local_sgd:16        the rule, in place of all, with the same exchange

Several with commas are made together: "bandwidth=2x,wire=bfloat16".
"""

from __future__ import annotations

from unisono.errors import UsageError
from unisono.plan.machines import MachineFacts
from unisono.plan.what_if import changed_machine
from unisono.training.planned_run import PlannedRun, with_rules
from unisono.wires import WIRES


def changed(run: PlannedRun, machine: MachineFacts, words: str) -> tuple[PlannedRun, MachineFacts]:
    """Return the run and its machine after the changes.

    Raises UsageError for words that are no change, an unknown wire or rule, and a value that the machine does not have.
    """
    for change in words.split(","):
        name, _, value = change.partition("=")
        if name == "wire":
            if value not in WIRES:
                raise UsageError(f"--what-if {words}: there is no wire {value!r}; there are {', '.join(WIRES)}")
            run = with_rules(run, None, value)
        elif name == "rule":
            run = with_rules(run, value, None)
        else:
            machine = changed_machine(machine, change)
    return run, machine
