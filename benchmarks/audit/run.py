"""Plants bit flips into audited steps, counts those that are found, and measures what an audit costs.

python benchmarks/audit/run.py [FLIPS [CLEAN [FOLDER]]]        300 flips, 10,000 clean comparisons
unisono lab --hosts 2 --rate 1gbit -- python benchmarks/audit/run.py --on-ranks costs 4 OUT.json

Starts ranks of itself: 3 and 2 for flips, 2 for costs. `results.json` has each flip. The second line measures costs
between hosts, where networks of many weights are exchanged.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import unisono
from unisono.data.builtin import load_digits
from unisono.errors import AuditError
from unisono.launch import find_mpiexec, launch_environment
from unisono.processor import processor
from unisono.training.audit import Audit, HashedSums, StepHashes
from unisono.training.trainer import Trainer
from unisono.world import World

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "exact"))
from ranks import network  # noqa: E402

SHARES, BATCH, ROUNDS = 8, 32, 200
STEPS_OF_A_TURN = 5
"""Steps of one kind, one after another: an update runs beside the next step."""
NETWORKS = ("small_convnet", "resnet8", "gpt")
COSTS = (("small_convnet", 8), ("resnet8", 8), ("resnet8", 32))
"""Networks whose step is measured, and the pixels of a side of their images."""
COSTS_BETWEEN_HOSTS = (("resnet50", 224), ("vgg_a", 224))
KINDS = ("forward", "backward", "gradient", "message", "weight")
PER_NETWORK = 10
"""Flips until another network and rule are taken."""


class Steps:
    """Audited steps of a network on digits."""

    def __init__(self, world: World, name: str, rule: str) -> None:
        self.world, self.model, self.hashes = world, network(name), list[StepHashes]()
        optimizer = torch.optim.SGD(self.model.parameters(), 0.02, momentum=0.9)
        kind = {"bsp": unisono.BSP, "sharded": unisono.Sharded}[rule]
        self.trainer = Trainer(self.model, world, kind(), optimizer, virtual_ranks=SHARES)
        self.audit = Audit(self.trainer, 0, 1.0, self.hashes.append)

    def step(self, index: int) -> tuple[Any, ...]:
        """Make a step. Return its hashes, and those of all ranks' weights."""
        data = load_digits().train
        rows = torch.randint(1437, (BATCH,), generator=torch.Generator().manual_seed(index))
        share = unisono.own_samples(self.model, BATCH)
        inputs, labels = data.inputs[rows[share.start : share.stop]], data.labels[rows[share.start : share.stop]]
        self.hashes.clear()
        self.audit.step(index, index, rows.numpy(), inputs, labels)
        weights = tuple(self.world.all_gather_object(self.audit.weights()))
        return self.world.call_on_root(lambda: self.hashes[-1]), weights

    def state(self) -> dict[str, Any]:
        self.trainer.wait()
        return deepcopy({"model": self.model.state_dict(), "optimizer": self.trainer.optimizer.state_dict()})

    def restore(self, state: dict[str, Any], index: int) -> None:
        """Go back to a state from before a step, as if the step before had just been made."""
        self.trainer.wait()
        self.model.load_state_dict(state["model"])
        self.trainer.optimizer.load_state_dict(deepcopy(state["optimizer"]))
        self.audit._last = index - 1, self.audit._copied()[1]


def flip(tensor: torch.Tensor, draw: random.Random) -> None:
    """Change a bit of a tensor in memory; autograd does not see it."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    flat.view(torch.int32)[draw.randrange(len(flat))] ^= torch.tensor(1 << draw.randrange(32)).to(torch.int32)


@contextmanager
def patched(name: str, act: Callable[..., None], wanted: int) -> Iterator[None]:
    """Call `act` before a method of the sums, for one bucket."""
    original = getattr(HashedSums, name)

    def method(sums: HashedSums, key: int, *rest: Any) -> None:
        if key == wanted:
            act(sums, key, *rest)
        original(sums, key, *rest)

    with patch.object(HashedSums, name, method):
        yield


@contextmanager
def hooked(kind: str, layer: nn.Module, call: int, draw: random.Random) -> Iterator[None]:
    """Change the weight of a layer before its call number `call`, or the result of that call, or of its gradient."""
    calls = itertools.count()

    def before(_: nn.Module, __: Any) -> None:
        if next(calls) == call:
            flip(next(layer.parameters()), draw)

    def change(gradient: torch.Tensor) -> torch.Tensor:
        flip(changed := gradient.clone(memory_format=torch.contiguous_format), draw)
        return changed

    def after(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if next(calls) != call:
            return
        if kind == "forward":
            flip(output, draw)
        else:
            output.register_hook(change)

    handle = layer.register_forward_pre_hook(before) if kind == "weight" else layer.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def planted(kind: str, steps: Steps, draw: random.Random) -> AbstractContextManager[None]:
    """Change one bit in the step that is made in the context, on this rank."""
    virtual, memory = steps.trainer.reducer.programs.virtual, steps.trainer.reducer.memory
    assert virtual is not None
    layers = [module for module in steps.model.modules() if not [*module.children()] and [*module.parameters()]]
    call, key = draw.randrange(2 * len(virtual.shares)), draw.choice(memory.keys)  # shares of another rank come first

    def gradient(_: HashedSums, __: int, terms: Any) -> None:
        parameter, _, part = draw.choice([piece for piece in memory.pieces(key) if piece[1].start < piece[1].stop])
        flip(memory.in_order(draw.choice(terms)[1][parameter], parameter)[part], draw)

    def message(sums: HashedSums, _: int, start: int, stop: int) -> None:
        parts = [range(max(start, here.start), min(stop, here.stop)) for _, here, _ in memory.pieces(key)]
        part = draw.choice([each for each in parts if each])
        flip(sums.integers(key)[part.start : part.stop], draw)

    if kind == "weight" and (steps.world.size == 2 or draw.random() < 0.5):
        flip(draw.choice([*steps.model.parameters()]), draw)  # while it lies in memory, between two steps
        return nullcontext()
    if kind == "gradient":
        return patched("measure", gradient, key)
    if kind != "message":
        return hooked(kind, draw.choice(layers), call, draw)
    if steps.world.size > 2 and draw.random() < 0.1:
        return patched("pack", lambda sums, *_: flip(sums.maxima(key), draw), key)
    return patched("decode", message, key)


def flips(world: World, count: int, seed: int) -> dict[str, Any]:
    """Plant flips until `count` of them have changed a bit of a hash. Return each, and clean comparisons."""
    draw, rows, comparisons, alarms = random.Random(seed), list[dict[str, Any]](), 0, list[str]()
    trial, effective, steps = 0, 0, None
    while effective < count:
        if steps is None or trial % PER_NETWORK == 0:
            which = trial // PER_NETWORK
            steps = Steps(world, NETWORKS[which % 3], ("bsp", "sharded")[which // 3 % 2])
        trial += 1
        kind, wrong = KINDS[trial % len(KINDS)], draw.randrange(world.size)
        state, compared = steps.state(), steps.audit.compared
        clean = None
        try:
            clean = steps.step(trial)
        except AuditError as error:
            alarms.append(str(error))
        comparisons += steps.audit.compared - compared
        after = steps.state()
        steps.restore(state, trial)
        row: dict[str, Any] = {"kind": kind, "rank": wrong, "ranks": world.size, "result": "masked"}
        inside = random.Random(draw.random())
        with planted(kind, steps, inside) if world.rank == wrong else nullcontext():
            try:
                changed = steps.step(trial) != clean
                row["result"] = "missed" if changed else "masked"
            except AuditError as error:
                named = re.match(r"step \d+, (?:share \d+, )?ranks? ([\d, and]+):", str(error))
                right = named is not None and named[1] == str(wrong)
                row |= {"result": "found" if right else "wrong rank", "error": str(error)}
        effective += row["result"] != "masked"
        rows.append(row)
        steps.restore(after, trial + 1)
    return {"flips": rows, "comparisons": comparisons, "alarms": alarms}


def clean(world: World, count: int) -> dict[str, Any]:
    """Make steps until `count` shares were computed again, and return the false alarms."""
    alarms, comparisons = list[str](), 0
    for name in NETWORKS:
        for rule in ("bsp", "sharded"):
            steps, index = Steps(world, name, rule), 0
            while steps.audit.compared < count / 6:
                index += 1
                try:
                    steps.step(index)
                except AuditError as error:
                    alarms.append(str(error))
                    break
            comparisons += steps.audit.compared
    return {"comparisons": comparisons, "alarms": alarms}


def costs(world: World, turns: int) -> list[dict[str, Any]]:
    """Milliseconds of a step: without an audit, with one that has nothing to do, with a chain, and with one share that
    each rank computes again; all take turns. With a number of turns, of one step each: of the networks between hosts,
    2 images a share."""
    results, data, batch = [], load_digits().train, 2 * SHARES if turns else 128
    steps = 1 if turns else STEPS_OF_A_TURN
    for name, side in COSTS_BETWEEN_HOSTS if turns else COSTS:
        inputs = data.inputs[:batch] if side == 8 else torch.rand(batch, 1, side, side)
        runs, trainers, folder = dict[str, Callable[[int], object]](), dict[str, Trainer](), Path(tempfile.mkdtemp())
        rows = slice(batch * world.rank // world.size, batch * (world.rank + 1) // world.size)
        for kind, fraction in (("off", None), ("idle", 1e-9), ("chain", 0.0), ("one share", world.size / SHARES)):
            model = network(name)
            optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
            rule = unisono.BSP(unisono.Exchange(bucket_bytes=1 << 20), "chain")
            trainer = Trainer(model, world, rule, optimizer, virtual_ranks=SHARES)
            trainers[kind], given = trainer, (inputs[rows], data.labels[:batch][rows])
            if fraction is None:
                runs[kind] = lambda step, trainer=trainer, given=given: trainer.step(*given, batch, step)
                continue
            from unisono.training.chain import Chain  # noqa: PLC0415

            chain = Chain(folder)
            if world.rank == 0 and kind == "chain":
                chain.begin(0, "", "")
            audit = Audit(trainer, 0, fraction, chain.add if kind == "chain" else None)
            numbers = torch.arange(batch).numpy()
            runs[kind] = lambda step, audit=audit, given=given, numbers=numbers: audit.step(step, step, numbers, *given)
        seconds: dict[str, list[float]] = {kind: [] for kind in runs}
        for first in range(1, turns + 2 if turns else ROUNDS, steps):
            for kind, act in runs.items():
                world.barrier()
                began = time.perf_counter()
                for step in range(first, first + steps):
                    act(step)
                trainers[kind].wait()  # else the next kind would pay for the last update
                seconds[kind].append((time.perf_counter() - began) / steps)
        medians = {kind: 1e3 * statistics.median(several[1 if turns else 2 :]) for kind, several in seconds.items()}
        everyone = world.all_gather_object(medians)
        row: dict[str, Any] = {"network": name, "side": inputs.shape[-1], "samples": batch}
        row |= {kind: max(of_rank[kind] for of_rank in everyone) for kind in medians}
        chance = 0.01 * SHARES / world.size  # of a step in which each rank computes a share again
        row["at 0.01"] = row["idle"] + chance * (row["one share"] - row["idle"])
        results.append(row)
    return results


def on_ranks(task: str, count: str, output: str) -> None:
    """Do a task on this rank; rank 0 writes what was found."""
    world = unisono.init()
    torch.set_num_threads(1)
    result = (
        costs(world, int(count))
        if task == "costs"
        else clean(world, int(count))
        if task == "clean"
        else flips(world, int(count), 0)
    )
    world.call_on_root(lambda: Path(output).write_text(json.dumps(result)))


def launched(ranks: int, task: str, count: int = 0) -> Any:
    """What rank 0 of so many has found."""
    environment = {**launch_environment(os.environ, terminal=False), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [str(find_mpiexec()), "-n", str(ranks), sys.executable, __file__, "--on-ranks", task, str(count)]
        subprocess.run([*command, str(output)], env=environment, check=True)
        return json.loads(output.read_text())


def main(wanted: str = "300", comparisons: str = "10000", folder: str = str(HERE)) -> None:
    """Plant flips, four of five on 3 ranks; compare clean steps; measure costs. Write `results.json` and print it."""
    target = Path(folder, "results.json")
    content = json.loads(target.read_text()) if target.exists() else {}
    content["environment"] = {
        "processor": processor().name,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    tasks = {
        "on 3 ranks": (3, "flips", int(wanted) * 4 // 5),
        "on 2 ranks": (2, "flips", int(wanted) - int(wanted) * 4 // 5),
        "clean": (2, "clean", int(comparisons)),
        "costs": (2, "costs", 0),
    }
    for name, (ranks, task, count) in tasks.items():
        if name not in content:
            content[name] = launched(ranks, task, count)
            target.write_text(json.dumps(content, indent=1) + "\n")
    rows = [row for name in ("on 3 ranks", "on 2 ranks") for row in content[name]["flips"]]
    for kind in (*KINDS, None):
        several = Counter(row["result"] for row in rows if kind in (row["kind"], None))
        print(f"{kind or 'all'}: {dict(several)}")
    compared = sum(content[name]["comparisons"] for name in ("on 3 ranks", "on 2 ranks", "clean"))
    alarms = sum(len(content[name]["alarms"]) for name in ("on 3 ranks", "on 2 ranks", "clean"))
    print(f"clean comparisons: {compared}, false alarms: {alarms}")
    for row in content["costs"]:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on-ranks"]:
        on_ranks(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
