"""States of ranks: what is loaded, and the options that stay."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from unisono.training.rank_states import load_optimizer
from unisono.training.workers.snapshots import WorkerSnapshot
from unisono.training.workers.worker import Worker


def test_an_optimizer_keeps_the_options_of_the_recipe() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    before = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    before.step()
    now = torch.optim.SGD([parameter], 0.2, momentum=0.5, nesterov=True)
    load_optimizer(now, before.state_dict())
    (group,) = now.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.2, 0.5, True)
    assert group["params"] == [parameter]
    assert torch.equal(now.state[parameter]["momentum_buffer"], torch.ones(2))


def test_a_resumed_worker_does_too() -> None:
    """Its snapshot has the options of before."""
    model = torch.nn.Linear(1, 1)
    before = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    now = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    reducer = SimpleNamespace(programs=SimpleNamespace(resume=lambda _: None))
    trainer = SimpleNamespace(model=model, optimizer=now, reducer=reducer)
    nothing = (None,) * 6
    worker = Worker(*nothing, trainer, *nothing[:2])  # type: ignore[arg-type]
    worker.resume(WorkerSnapshot(dict(model.state_dict()), before.state_dict(), 4, 8, 1.5, 32))
    assert now.param_groups[0]["momentum"] == 0.5
    assert (worker.steps, worker.samples, worker.known) == (4, 8, 32)
