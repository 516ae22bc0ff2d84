"""EASGD in one process: equal to the equations written out, on any number of workers, servers and buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from unisono.rules import EASGD, Exchange
from unisono.rules.asynchronous import random_arrivals
from unisono.step.layout import Bucket, Layout
from unisono.testing import Batch, InProcessReplica, serve_in_order

FEATURES, CLASSES = 5, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


LAYOUT = Layout(4, 4, (Bucket(120, (3, 2)), Bucket(80, (0,), ((0, 9),)), Bucket(60, (0, 1), ((9, 20), (0, 4)))))
"""Four parameters in three buckets; the largest is cut in two. The number of ranks is that of a server rank besides."""


def batches(worker: int, steps: int) -> list[Batch | None]:
    generator = torch.Generator().manual_seed(worker)
    return [
        Batch(
            torch.randn(6, FEATURES, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (6,), generator=generator),
        )
        for _ in range(steps)
    ]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)


def played(
    rule: EASGD, orders: Sequence[Sequence[int]], steps: Sequence[int], seed: int = 0
) -> tuple[list[nn.Module], dict[int, torch.Tensor]]:
    ranks = len(steps) + (rule.servers if rule.server == "rank" else 0)
    layout = Layout(ranks, LAYOUT.parameters, LAYOUT.buckets)
    nets = [model() for _ in steps]
    workers = [
        InProcessReplica(net, optimizer_of(net), nn.functional.cross_entropy, layout, batches(worker, count))
        for worker, (net, count) in enumerate(zip(nets, steps, strict=True))
    ]
    centres = serve_in_order(rule, workers, orders, steps, seed)
    return nets, {key: flat for centre in centres for key, flat in centre.flats.items()}


def initial(net: nn.Module, layout: Layout) -> dict[int, torch.Tensor]:
    parameters = [parameter.detach().reshape(-1) for parameter in net.parameters()]
    values = {}
    for key in layout.keys:
        bucket = layout.bucket(key)
        full_ranges = tuple((0, len(parameters[index])) for index in bucket.parameters)
        parts = zip(bucket.parameters, bucket.ranges or full_ranges, strict=True)
        values[key] = torch.cat([parameters[index][a:b] for index, (a, b) in parts])
    return values


def written_out(alpha: float, period: int, order: Sequence[int], steps: Sequence[int]) -> tuple[list[nn.Module], list]:
    """The equations: gradient and elastic force of the same weights, one worker after another."""
    nets, centre = [model() for _ in steps], [parameter.detach().clone() for parameter in model().parameters()]
    optimizers, left = [optimizer_of(net) for net in nets], [iter(batches(n, c)) for n, c in enumerate(steps)]
    made = [0] * len(steps)

    def step(worker: int, exchange: bool) -> None:
        net, batch = nets[worker], next(left[worker])
        optimizers[worker].zero_grad()
        nn.functional.cross_entropy(net(batch.inputs), batch.labels).backward()
        if exchange:
            with torch.no_grad():
                for weight, its in zip(net.parameters(), centre, strict=True):
                    difference = alpha * (weight - its)
                    weight.sub_(difference)
                    its.add_(difference)
        optimizers[worker].step()
        made[worker] += 1

    for worker in order:
        while (made[worker] + 1) % period:
            step(worker, False)
        step(worker, True)
    for worker, count in enumerate(steps):
        while made[worker] < count:
            step(worker, False)
    return nets, centre


def assert_close(net: nn.Module, other: nn.Module) -> None:
    for parameter, expected in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-12)


@settings(max_examples=10)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.sampled_from(["chain", "none", "funnel"]),
    st.integers(0, 1 << 20),
)
def test_easgd_is_the_equations_of_the_paper(workers: int, period: int, alpha: float, overlap: str, seed: int) -> None:
    steps = [4 + worker for worker in range(workers)]
    (order,) = random_arrivals([count // period for count in steps], 1, seed)
    nets, centre = played(EASGD(overlap=overlap, alpha=alpha, period=period), [order], steps, seed)
    expected, its = written_out(alpha, period, order, steps)
    for net, other in zip(nets, expected, strict=True):
        assert_close(net, other)
    layout = Layout(workers + 1, LAYOUT.parameters, LAYOUT.buckets)
    stand_in = model()
    with torch.no_grad():
        for weight, value in zip(stand_in.parameters(), its, strict=True):
            weight.copy_(value)
    for key, flat in initial(stand_in, layout).items():
        torch.testing.assert_close(centre[key], flat, rtol=0, atol=1e-12)


def test_the_same_orders_give_the_same_bits_and_others_do_not() -> None:
    rule, steps = EASGD(servers=2, server="thread"), [5, 5, 5]
    orders = random_arrivals([5, 5, 5], 2, 1)
    _, first = played(rule, orders, steps, seed=1)
    _, same = played(rule, orders, steps, seed=2)
    _, other = played(rule, random_arrivals([5, 5, 5], 2, 3), steps, seed=1)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_an_exchange_moves_both_ends_by_the_same_and_keeps_their_sum() -> None:
    """alpha = 1 swaps worker and centre."""
    (net,), centre = played(EASGD(alpha=1.0), [[0]], [1])
    start = initial(model(), LAYOUT)
    for key, flat in centre.items():
        assert torch.equal(flat, start[key])  # both began equal: no force
    (net,), _ = played(EASGD(alpha=1.0, period=2), [[0]], [2])
    assert not torch.equal(next(net.parameters()), next(model().parameters()))


def test_a_wire_of_16_bits_follows_the_exact_exchange() -> None:
    """What one exchange rounds away the next one sends: after 30 exchanges the centre is as near as after 5."""
    distances = []
    for count in (5, 30):
        steps = [count] * 3
        (order,) = random_arrivals(steps, 1, 0)
        _, exact = played(EASGD(), [order], steps)
        _, rounded = played(EASGD(Exchange(wire="bfloat16")), [order], steps)
        distances.append(max(float((exact[key] - rounded[key]).abs().max()) for key in exact))
    assert 0 < distances[0] < 1e-2
    assert distances[1] < 3 * distances[0] + 1e-3
