"""An audit on real ranks: the same hashes for any number of them, and flipped bits are found and their ranks named."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono
from unisono.data.builtin import load_digits
from unisono.errors import AuditError, UsageError
from unisono.training.audit import Audit, HashedSums, StepHashes
from unisono.training.chain import Chain, read_chain
from unisono.training.recipe import Recipe, parse_recipe
from unisono.training.recompute import recompute
from unisono.training.run import TrainOptions, make_parts, train
from unisono.training.trainer import Trainer
from unisono.world import World

SHARES, SIZES = 5, (20, 20, 3, 20)


class Run:
    """A small network with batch norm and dropout, whose steps are hashed."""

    def __init__(self, world: World, rule: unisono.BSP | None = None, fraction: float = 1.0) -> None:
        torch.manual_seed(0)
        parts = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 10)
        self.model = nn.Sequential(*parts)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.trainer = Trainer(self.model, world, rule or unisono.BSP(), optimizer, virtual_ranks=SHARES)
        self.hashes = list[StepHashes]()
        self.audit, self.step_number = Audit(self.trainer, 0, fraction, self.hashes.append), 0

    def step(self) -> None:
        data, order = load_digits().train, torch.randperm(1437, generator=torch.Generator().manual_seed(1))
        batch = order[20 * self.step_number :][: SIZES[self.step_number % len(SIZES)]]
        mine = unisono.own_samples(self.model, len(batch))
        rows = batch[mine.start : mine.stop]
        self.step_number += 1
        self.audit.step(self.step_number, self.step_number, batch.numpy(), data.inputs[rows], data.labels[rows])


def test_any_number_of_ranks_has_the_same_hashes(world: World) -> None:
    """Batches are short, rules and buckets differ, and shares are computed again or not."""
    hashes = []
    for ranks in range(1, world.size + 1):
        group = world.split(world.rank // ranks)
        rule = unisono.Sharded if ranks % 2 == 0 else unisono.BSP
        run = Run(group, rule(unisono.Exchange(bucket_bytes=1000 * ranks)), float(ranks % 3 != 1))
        for _ in SIZES:
            run.step()
        hashes.append(run.hashes)
        assert run.audit.compared == (18 if ranks % 3 != 1 else 0)
        group.free()
    assert all(rank_hashes == hashes[0] for rank_hashes in world.call_on_root(lambda: hashes))


def flip(tensor: torch.Tensor) -> None:
    """Change one bit of a tensor's largest number, in memory: autograd does not see it."""
    flat = tensor.detach().view(-1)
    flat.view(torch.int32)[flat.abs().argmax()] ^= 1 << 20


def plant(kind: str, run: Run, patch: pytest.MonkeyPatch) -> None:
    """Change a bit in the next step, on this rank."""
    last, virtual, once = run.model[5], run.trainer.reducer.programs.virtual, iter([True])
    assert virtual is not None
    if kind == "weight":
        flip(last.weight)
    elif kind == "product":
        calls = iter([*[False] * len(virtual.shares), True])  # shares of another rank come first
        last.register_forward_hook(lambda _, __, output: flip(output) if next(calls, False) else None)
    elif kind == "gradient":
        measure = HashedSums.measure

        def changed(sums: HashedSums, key: int, terms: Any) -> None:
            if next(once, False):
                flip(next(term for term in terms[0][1].values() if term is not None))
            measure(sums, key, terms)

        patch.setattr(HashedSums, "measure", changed)
    else:
        decode = HashedSums.decode

        def received(sums: HashedSums, key: int, start: int, stop: int) -> None:
            if next(once, False):
                places = [(max(start, here.start), here.stop) for _, here, _ in sums._memory.pieces(key)]
                sums.integers(key)[next(begin for begin, end in places if begin < end)] ^= 1 << 20
            decode(sums, key, start, stop)

        patch.setattr(HashedSums, "decode", received)


WORDS = {
    "weight": "the weights have changed in memory since the step before",
    "product": "gradients from the same samples and weights differ from (the one that|each other)",
    "gradient": "gradients from the same samples and weights differ from (the one that|each other)",
    "message": "the received sum of gradients differs from the sum of what the ranks have sent",
}


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("rule", [unisono.BSP, unisono.Sharded])
def test_a_flipped_bit_is_found_and_its_rank_named(
    world: World, kind: str, rule: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, wrong = Run(world, rule()), world.size - 1
    run.step()
    run.step_number += 3  # a batch of full size
    run.audit._last = (run.step_number, run.audit._last[1])
    if world.rank == wrong:
        plant(kind, run, monkeypatch)
    with pytest.raises(AuditError, match=rf"^step 5, (share \d, )?rank {wrong}: {WORDS[kind]}.*go on without") as error:
        run.step()
    assert ("share" in str(error.value)) == (kind in ("product", "gradient"))


def test_weights_of_one_rank_that_differ_before_a_step(world: World) -> None:
    """Most are right; of two ranks nobody knows which."""
    run = Run(world)
    if world.rank == 0:
        flip(run.model[5].weight)
    expected = "rank 0: the weights before" if world.size > 2 else "ranks 0 and 1: the weights .*no majority"
    with pytest.raises(AuditError, match=expected) if world.size > 1 else nullcontext():
        run.step()


RECIPE = {
    "model": {"name": "small_convnet"},
    "training": {"epochs": 1, "batch": 256, "virtual_ranks": 4, "checkpoint_every": 2},
    "compute": {"convolutions": "library"},
    "audit": {"chain": True, "fraction": 0.2},
}


def test_a_step_of_a_run_is_recomputed(world: World, tmp_path: Path) -> None:
    """On all ranks and on one; then a gradient in the chain is another."""
    home, recipe = world.call_on_root(lambda: tmp_path) / "run", parse_recipe(Recipe, RECIPE, "a test")
    assert train(recipe, world, TrainOptions(home)) == 0
    sentence, same = recompute(home, recipe, world, 6)
    assert same
    assert f"step 6 is the same, recomputed from the checkpoint of step 4 on {world.size} rank" in sentence
    alone = world.split(world.rank)

    def forge() -> list[tuple[str, bool]]:
        results = [recompute(home, recipe, alone, None)]
        lines = read_chain(home / "chain.jsonl")
        (home / "chain.jsonl").unlink()
        chain = Chain(home)
        chain.begin(0, lines[0]["recipe"], lines[0]["weights"])
        lines[5]["gradients"][2] = "other"
        for line in lines[1:]:
            chain.add(StepHashes(**{key: value for key, value in line.items() if key != "chain"}))
        return [*results, recompute(home, recipe, alone, 6)]

    right, wrong = world.call_on_root(forge)
    assert right[1], right
    assert wrong[0].startswith(
        "step 5 is not the same, recomputed from the checkpoint of step 4 on 1 rank; what differs"
    )
    assert wrong[0].endswith("first: the gradient of share 2, from the same samples")
    assert not wrong[1]
    alone.free()


def test_nothing_is_the_same_that_was_not_recomputed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data are others, or fewer; or what is left are checkpoints from before the run had other keys."""
    home, recipe = world.call_on_root(lambda: tmp_path) / "run", parse_recipe(Recipe, RECIPE, "a test")
    assert train(recipe, world, TrainOptions(home)) == 0

    def changed(**facts: Any) -> None:
        def make(*given: Any) -> Any:
            feed, *others = make_parts(*given)
            for name, value in facts.items():
                setattr(feed, name, value)
            return feed, *others

        monkeypatch.setattr("unisono.training.recompute.make_parts", make)

    changed(samples=1024)  # 4 steps of 6
    with pytest.raises(UsageError, match=r"^--step 6: the recipe's epochs of 1024 samples end before it"):
        recompute(home, recipe, world, 6)
    changed(fingerprint="48 others")
    with pytest.raises(UsageError, match=r"^--step 6 was made from other data \(1437 .*\) than .* \(48 others\)"):
        recompute(home, recipe, world, 6)
    monkeypatch.undo()
    longer = replace(recipe, training=replace(recipe.training, epochs=3))
    longer = replace(longer, optimizer=replace(longer.optimizer, learning_rate=0.01))
    assert train(longer, world, TrainOptions(resume=home)) == 0
    assert recompute(home, longer, world, 18)[1]
    with pytest.raises(UsageError, match=r"^--step 8 can only be recomputed from a checkpoint of step 6 or later"):
        recompute(home, longer, world, 8)
