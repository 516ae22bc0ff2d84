"""Networks and batches that split networks are compared on with whole ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

import unisono
from unisono.mpi import MPI
from unisono.network.choice import read_table
from unisono.placement import place
from unisono.schedules.pieces import bounds
from unisono.tensor_parallel import seed_dropout
from unisono.tensor_parallel.model import split_model
from unisono.world import World

SAMPLES = 12


class Block(nn.Module):
    """Transformer block with 12 heads of 2 features; its number of heads is that of the features it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.query, self.key, self.value = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.attention_dropout = nn.Dropout(0.1)
        self.out = nn.Linear(24, 24)
        self.up, self.act, self.dropout, self.down = nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            projection(y).unflatten(-1, (-1, 2)).transpose(1, 2) for projection in (self.query, self.key, self.value)
        )
        scores = self.attention_dropout((q @ k.transpose(-1, -2)).softmax(-1))
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.dropout(self.act(self.up(self.norm2(x)))))


class Words(nn.Module):
    """Embedding of 11 words and its transpose, with a hidden layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(11, 12, padding_idx=3), nn.Linear(12, 12)
        self.scores = nn.Linear(12, 5)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.tanh(self.hidden(self.words(numbers))).mean(1))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    plans: Mapping[str, Mapping[str, str]]
    """Plans without the sizes of groups."""
    inputs: Callable[[torch.Generator], torch.Tensor]
    classes: int = 5


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 24),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(24, 12),
        nn.Dropout(0.1),
        nn.Linear(12, 12),
        nn.Linear(12, 5),
    )


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1),
        nn.GroupNorm(3, 12),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(24 * 4, 12),
        nn.ReLU(inplace=True),
        nn.Linear(12, 5),
    )


def vgg() -> nn.Module:
    """VGG-A in small: convolutions, then three wide layers with dropouts."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 24),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(24, 24),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.Linear(24, 12),
    )


def alexnet() -> nn.Module:
    """AlexNet in small: strides, response norms and grouped convolutions, then three wide layers with dropouts."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 5, 2, 2),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(5),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(12, 24, 3, padding=1, groups=2),
        nn.ReLU(inplace=True),
        nn.LocalResponseNorm(5),
        nn.Flatten(),
        nn.Linear(96, 24),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(24, 24),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(24, 12),
    )


def cd_dnn() -> nn.Module:
    """CD-DNN in small: wide layers alone, with sigmoids."""
    wide = [layer for _ in range(4) for layer in (nn.Linear(24, 24), nn.Sigmoid())]
    return nn.Sequential(*wide, nn.Linear(24, 5))


def transformer() -> nn.Module:
    return nn.Sequential(Block(), nn.Flatten(), nn.Linear(24 * 3, 5))


def encoder() -> nn.Module:
    """PyTorch's transformer layer, with dropouts of the attention and elsewhere."""
    layer = nn.TransformerEncoderLayer(24, 12, 48, 0.1, nn.GELU(), batch_first=True, norm_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24 * 3, 5))


def normal(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)


PAIR, CHAIN = ("column gives part", "row takes part"), ("row gives part", "row takes part gives part", "row takes part")
ATTENTION = dict.fromkeys(("0.query", "0.key", "0.value", "0.up"), "column gives part")

CASES = {
    "mlp": Case(
        mlp,
        {
            "pair": {"0": PAIR[0], "3": PAIR[1]},
            "whole": {"0": "column", "3": "row", "5": "column"},
            "chain": dict(zip(("0", "3", "5"), CHAIN, strict=True)),
            "columns": {"3": "column gives part", "5": "column takes part"},
        },
        normal(12),
    ),
    "convnet": Case(
        convnet,
        {"channels": {"0": "column", "4": "column"}, "pair": {"4": PAIR[0], "8": PAIR[1]}},
        normal(2, 4, 4),
    ),
    "vgg": Case(
        vgg,
        {
            "wide": {"7": PAIR[0], "10": PAIR[1], "13": "column"},
            "single": {"7": "column", "10": "row", "13": "column"},
            "channels": {"3": "column", "7": "row", "10": PAIR[0], "13": PAIR[1]},
        },
        normal(3, 8, 8),
        12,
    ),
    "alexnet": Case(
        alexnet,
        {"wide": {"8": PAIR[0], "11": PAIR[1], "14": "column"}, "rows": {"8": "row", "11": "column", "14": "row"}},
        normal(3, 11, 11),
        12,
    ),
    "cd_dnn": Case(
        cd_dnn,
        {"pairs": {"0": PAIR[0], "2": PAIR[1], "4": PAIR[0], "6": PAIR[1]}},
        normal(24),
    ),
    "transformer": Case(
        transformer,
        {"block": {**ATTENTION, "0.out": PAIR[1], "0.down": PAIR[1], "0.attention_dropout": "dropout dim 1"}},
        normal(3, 24),
    ),
    "encoder": Case(
        encoder,
        {
            "heads": {"0.self_attn": "heads", "0.linear1": PAIR[0], "0.linear2": PAIR[1]},
            "attention": {"0.self_attn": "heads"},
        },
        normal(3, 24),
    ),
    "words": Case(
        Words,
        {"rows": {"words": "row"}, "parts": {"words": "row gives part", "hidden": "row takes part"}},
        lambda generator: torch.randint(0, 11, (SAMPLES, 4), generator=generator),
    ),
}


def batch(case: Case, step: int, samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step: one of four."""
    generator = torch.Generator().manual_seed(step % 4)
    return case.inputs(generator)[:samples], torch.randint(0, case.classes, (samples,), generator=generator)


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(1)
    return case.make().double()


def with_sizes(plan: Mapping[str, str], size: int) -> dict[str, str]:
    """A plan with groups of `size` ranks."""
    return {name: " ".join([text.split()[0], str(size), *text.split()[1:]]) for name, text in plan.items()}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, world: World, steps: range, samples: int = SAMPLES
) -> list[float]:
    """Train a parallel model on this rank's shares of the batches. Return the losses over whole batches."""
    losses = []
    for step in steps:
        inputs, labels = batch(case, step, samples)
        first, last = bounds(samples, world.size, world.rank)
        seed_dropout(model, 7, step, first)
        optimizer.zero_grad()
        scores = model(inputs[first:last])
        loss = nn.functional.cross_entropy(scores, labels[first:last]) if last > first else scores.sum()
        unisono.add_samples(model, last - first)
        loss.backward()
        optimizer.step()
        total = world.allreduce(loss.detach() * (last - first))
        losses.append(float(total) / samples)
    return losses


def alone(case: Case, steps: int, samples: int = SAMPLES) -> tuple[list[float], nn.Module]:
    """Losses of the whole model on whole batches, on one rank, and the model, which nobody is to change: made once."""
    return _alone(case.make, case.inputs, case.classes, steps, samples)


@cache
def _alone(
    make: Callable[[], nn.Module],
    inputs: Callable[[torch.Generator], torch.Tensor],
    classes: int,
    steps: int,
    samples: int,
) -> tuple[list[float], nn.Module]:
    case, world = Case(make, {}, inputs, classes), World(MPI.COMM_SELF.Dup(), place([0]), read_table())
    model = model_of(case)
    split_model(model, world, {})
    unisono.parallel(model, world)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)
    losses = train(model, optimizer, case, world, range(steps), samples)
    trained = copy.deepcopy(model)
    world.free()
    return losses, trained


def dropped(classes: int, channels: int) -> nn.Module:
    """A network with dropouts for images of 8 x 8, as a recipe names it."""
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(144, 32),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(32, classes),
    )
