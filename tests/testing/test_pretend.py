import copy
import ctypes
import gc
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unisono.testing.pretend import reseed, use_pretend
from unisono.testing.pretend_device import Memory, StreamEngine

pytestmark = pytest.mark.device  # such tests come last: the device stays in the process


@pytest.fixture(scope="module", autouse=True)
def pretend() -> Any:
    use_pretend(seed=1)
    use_pretend(seed=1)
    yield torch.get_device_module("pretend")
    torch.get_device_module("pretend").synchronize()


def wrong_for(example: Callable[..., bool], seeds: int, *without: str) -> list[int]:
    """Return the seeds for which an example goes wrong, without a step of it if one is named."""
    wrong = []
    for seed in range(seeds):
        reseed(seed)
        if not example(*without):
            wrong.append(seed)
    return wrong


def test_devices(pretend: Any) -> None:
    assert torch.zeros(2, device="pretend").device == torch.device("pretend:0")
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("pretend")
    assert torch.accelerator.device_count() == pretend.device_count() == 2
    with pretend.device(1):
        assert torch.zeros(2, device="pretend").device == torch.device("pretend:1")
    torch.accelerator.set_device_index(1)
    assert pretend.current_device() == torch.accelerator.current_device_index() == 1
    pretend.set_device("pretend:0")
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="pretend:2 does not exist"):
        torch.zeros(2, device="pretend:2")
    with pytest.raises(RuntimeError, match="has 2 devices"):
        use_pretend(devices=3)


def test_values_go_to_a_device_and_back() -> None:
    values = torch.arange(6.0).view(2, 3)
    there = values.to("pretend")
    assert torch.equal(there.cpu(), values)
    assert torch.equal(there.to("pretend:1").to(torch.int32).cpu(), values.int())
    assert torch.equal(there.t().contiguous().cpu(), values.t())
    assert there.sum().item() == 15
    assert torch.arange(3, device="pretend").tolist() == [0, 1, 2]
    assert (torch.full((2,), 3, device="pretend") * 2.5).dtype == torch.float32
    back = torch.empty(3, 2)
    back.copy_(there.view(3, 2))
    assert torch.equal(back, values.view(3, 2))


def test_views_share_memory() -> None:
    flat = torch.arange(10.0, device="pretend")
    flat[3:7].view(2, 2).add_(torch.tensor([[10.0, 20.0], [30.0, 40.0]], device="pretend"))
    torch.as_strided(flat, (2,), (9,)).zero_()
    torch.view_as_complex(flat[2:4].view(1, 2)).mul_(1j)
    assert flat.tolist() == [0, 1, -13, 2, 24, 35, 46, 7, 8, 0]
    assert torch.view_as_real(torch.view_as_complex(flat.view(5, 2)).conj().resolve_conj()).tolist()[1] == [-13, -2]
    flat[flat > 20] = 0.0
    flat[torch.tensor([0, 9])] = 5.0
    assert flat.tolist() == [5, 1, -13, 2, 0, 0, 0, 7, 8, 5]
    assert flat[flat > 6].tolist() == [7, 8]
    out = torch.empty(0, device="pretend")
    torch.add(flat, 1, out=out)
    assert out.tolist() == [value + 1 for value in flat.tolist()]
    assert flat[1:3].clone().resize_(4)[:2].tolist() == [1, -13]


def test_the_host_cannot_read_the_memory() -> None:
    tensor = torch.arange(4.0, device="pretend")
    with pytest.raises(TypeError, match="can't convert pretend:0"):
        tensor.numpy()
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [[int(bound, 16) for bound in line.split()[0].split("-")] for line in lines]
    assert not any(begin <= tensor.data_ptr() < end for begin, end in mapped)
    assert tensor[1:].data_ptr() == tensor.data_ptr() + 4
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        ctypes.c_char.from_buffer(tensor.untyped_storage())
    assert torch.empty(3, device="pretend").isnan().all()
    assert torch.empty(3, dtype=torch.int64, device="pretend").tolist() == [-1] * 3


def test_devices_do_not_mix() -> None:
    host, first, second = torch.ones(3), torch.ones(3, device="pretend:0"), torch.ones(3, device="pretend:1")
    mixes: list[Callable[[], Any]] = [
        lambda: host + first,
        lambda: first * second,
        lambda: first.add_(host),
        lambda: torch.cat([first, host]),
        lambda: torch.dot(first, second),
        lambda: nn.functional.linear(first, torch.ones(2, 3)),
        lambda: nn.functional.embedding(torch.tensor([0]), first.view(3, 1)),
        lambda: torch.where(first > 0, first, second),
    ]
    for mix in mixes:
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix()
    assert (first * torch.tensor(2.0)).tolist() == [2, 2, 2]


def test_errors_of_shapes_come_at_the_call_and_of_values_later(pretend: Any) -> None:
    reseed(None)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(2, 2, device="pretend") @ torch.ones(3, 2, device="pretend")
    with pytest.raises(RuntimeError, match="must match"):
        torch.ones(2, device="pretend") + torch.ones(3, device="pretend")
    nn.functional.embedding(torch.tensor([7], device="pretend"), torch.ones(3, 2, device="pretend"))
    with pytest.raises(RuntimeError, match="ran late failed"):
        pretend.synchronize()
    pretend.synchronize()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.normalization = nn.BatchNorm2d(3)
        self.last = nn.Linear(48, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.normalization(self.convolution(inputs)))
        return self.norm(self.last(hidden.flatten(1)))


def trained(device: str, seed: int, optimizer: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    network = Network().double().to(device)
    part = optimizer(network.parameters())
    norm = torch.zeros(())
    for _ in range(5):
        inputs, labels = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.randint(5, (4,))
        part.zero_grad()
        nn.functional.cross_entropy(network(inputs.to(device)), labels.to(device)).backward()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in network.parameters()])
        part.step()
    network.eval()
    return [*network.state_dict().values(), norm, network(torch.ones(1, 2, 4, 4, dtype=torch.float64, device=device))]


def test_training_gives_the_numbers_of_the_host() -> None:
    optimizers: list[Callable[..., torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
    ]
    for seed in range(20):
        reseed(seed)
        optimizer, device = optimizers[seed % 4], f"pretend:{seed // 4 % 2}"
        there, here = trained(device, seed, optimizer), trained("cpu", seed, optimizer)
        for result, expected in zip(there, here, strict=True):
            assert torch.allclose(result.cpu(), expected, rtol=0, atol=1e-12)


def test_shapes_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each of what they depend on: equal numbers of other types, the default type, and a size to be given."""
    from unisono.testing import pretend as module

    def types() -> list[torch.dtype]:
        return [torch.full((7, 3), value, device="pretend").dtype for value in (1, 1.0, True)]  # type: ignore[arg-type]

    def double() -> torch.dtype:
        torch.set_default_dtype(torch.float64)
        try:
            return torch.full((7, 3), 1.0, device="pretend").dtype
        finally:
            torch.set_default_dtype(torch.float32)

    def sums() -> list[int]:
        out = torch.empty(0, device="pretend")
        return list(torch.add(torch.ones(7, 3, device="pretend"), 1, out=out).shape)

    first = types(), double(), sums()
    assert first == ([torch.int64, torch.float32, torch.bool], torch.float64, [7, 3])
    traced = []
    trace = module._trace
    monkeypatch.setattr(module, "_trace", lambda op, *rest: (traced.append(op), trace(op, *rest))[1])
    assert (types(), double(), sums()) == first
    assert traced == []


def test_random_numbers_come_from_the_seed_not_from_the_schedule(pretend: Any) -> None:
    def draw(seed: int) -> list[float]:
        reseed(seed)
        torch.manual_seed(5)
        dropped = nn.Dropout(0.5)(torch.ones(20, device="pretend"))
        return [*torch.randn(3, device="pretend").tolist(), *dropped.tolist(), *torch.randperm(9, device="pretend")]

    assert draw(1) == draw(2) == draw(3)
    assert set(draw(1)[3:23]) == {0.0, 2.0}
    state = pretend.get_rng_state()
    first = torch.rand(3, device="pretend").tolist()
    assert torch.rand(3, device="pretend").tolist() != first
    pretend.set_rng_state(state)
    assert torch.rand(3, device="pretend").tolist() == first


def test_embeddings_have_gradients() -> None:
    embedding = nn.Embedding(5, 2, device="pretend")
    embedding(torch.tensor([1, 1, 3], device="pretend")).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]


def test_networks_are_copied_saved_and_loaded() -> None:
    network = Network().to("pretend:1")
    twin = copy.deepcopy(network)
    file = io.BytesIO()
    torch.save(network.state_dict(), file)
    for place, expected in ((None, "pretend:1"), ("cpu", "cpu"), ("pretend:0", "pretend:0")):
        file.seek(0)
        state = torch.load(file, map_location=place)
        assert {value.device for value in state.values()} == {torch.device(expected)}
        twin.load_state_dict(state)
        for name, value in network.state_dict().items():
            assert torch.equal(twin.state_dict()[name].cpu(), value.cpu())


def test_pinned_memory(pretend: Any) -> None:
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.zeros(3, pin_memory=True)[1:].is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()
    assert not torch.ones(3).is_pinned()
    reseed(None)  # nothing runs that nobody waits for
    source, target, pageable = torch.ones(3).pin_memory(), torch.zeros(3, pin_memory=True), torch.ones(3)
    late, early = (torch.empty(3, device="pretend").copy_(host, non_blocking=True) for host in (source, pageable))
    target.copy_(late, non_blocking=True)
    source.fill_(2)
    pageable.fill_(2)
    assert target.tolist() == [0, 0, 0]
    pretend.synchronize()
    assert target.tolist() == late.tolist() == [2, 2, 2]
    assert early.tolist() == torch.empty(3).copy_(early, non_blocking=True).tolist() == [1, 1, 1]


def test_events_and_streams(pretend: Any) -> None:
    reseed(None)
    stream, begin, end = (
        pretend.Stream("pretend:1"),
        pretend.Event(enable_timing=True),
        pretend.Event(enable_timing=True),
    )
    assert pretend.current_stream(1) is pretend.default_stream("pretend:1")
    assert begin.query()
    with pretend.stream(stream):
        assert (pretend.current_device(), pretend.current_stream()) == (1, stream)
        torch.ones(3, device="pretend")
        begin.record()
        torch.ones(3, device="pretend")
        stream.record_event(end)
    assert (pretend.current_device(), pretend.current_stream().device_index) == (0, 0)
    assert not (begin.query() or stream.query())
    with pytest.raises(RuntimeError, match="must be recorded and have happened"):
        begin.elapsed_time(end)
    begin.synchronize()
    assert begin.query()
    assert not end.query()
    stream.synchronize()
    assert end.query()
    assert stream.query()
    assert begin.elapsed_time(end) > 0
    seen = []
    pretend.set_stream(other := pretend.Stream())
    thread = threading.Thread(target=lambda: seen.append(pretend.current_stream()))
    thread.start()
    thread.join()
    assert (pretend.current_stream(), seen) == (other, [pretend.default_stream()])
    pretend.set_stream(pretend.default_stream())


def exchange(without: str = "") -> bool:
    """A gradient goes to the host on a side stream, the host adds to it, and it comes back on that stream."""
    pretend = torch.get_device_module("pretend")
    main, side, sent, came = pretend.current_stream(), pretend.Stream(), pretend.Event(), pretend.Event()
    first = torch.full((4,), 3.0, device="pretend")
    gradient = first * 2
    if without != "side waits":
        side.wait_stream(main)
    host = torch.empty(4, pin_memory=True)
    with pretend.stream(side):
        host.copy_(gradient, non_blocking=True)
        sent.record()
    if without != "record_stream":
        gradient.record_stream(side)
    del gradient
    busy = [first * factor for factor in range(5)]  # one of them may have the gradient's memory
    if without != "host waits":
        sent.synchronize()
    host.add_(1)
    result = torch.empty(4, device="pretend")
    with pretend.stream(side):
        result.copy_(host, non_blocking=True)
        came.record()
    if without != "main waits":
        main.wait_event(came)
    total = result + sum(busy)
    while without != "memory is kept" and not came.query():
        pass
    host.fill_(0)
    right: bool = total.tolist() == [37.0] * 4
    pretend.synchronize()
    return right


def test_only_what_synchronises_enough_is_right_for_all_seeds() -> None:
    assert wrong_for(exchange, 200) == []
    for without in ("side waits", "record_stream", "host waits", "main waits", "memory is kept"):
        assert wrong_for(exchange, 40, without), without


def backward(without: str = "") -> bool:
    """The forward pass is on a stream; hooks copy the gradients to the host on another one."""
    pretend = torch.get_device_module("pretend")
    forward, copies, linear = pretend.Stream(), pretend.Stream(), nn.Linear(3, 3, device="pretend")
    gradients, threads = [], set()

    def copy_gradient(parameter: torch.Tensor) -> None:
        ready, host = pretend.Event(), torch.empty(parameter.shape, pin_memory=True)
        ready.record(pretend.current_stream())
        with pretend.stream(copies):
            if without != "copies wait":
                copies.wait_event(ready)
            assert parameter.grad is not None
            host.copy_(parameter.grad, non_blocking=True)
        gradients.append(host)
        threads.add(threading.get_ident())
        assert pretend.current_stream() is forward

    for parameter in linear.parameters():
        parameter.register_post_accumulate_grad_hook(copy_gradient)
    forward.wait_stream(pretend.current_stream())
    with pretend.stream(forward):
        loss = (linear(torch.ones(2, 3, device="pretend")) * 3).sum()
    pretend.current_stream().wait_stream(forward)
    loss.backward()
    assert pretend.current_stream() is pretend.default_stream()
    assert (threads == {threading.get_ident()}) is not StreamEngine.threads
    assert linear.weight.grad is not None
    there = (linear.weight.grad + 0).cpu()  # on the caller's stream, which waits for the backward pass
    if without != "host waits":
        copies.synchronize()
    right = all(bool((gradient == 6).all()) for gradient in [*gradients, there])
    pretend.synchronize()
    return right


def test_a_backward_pass_runs_on_the_streams_of_the_forward_pass() -> None:
    assert wrong_for(backward, 100) == []
    for without in ("copies wait", "host waits"):
        assert wrong_for(backward, 20, without), without


def test_threads_have_their_own_streams_and_backward_passes() -> None:
    wrong = []

    def use(index: int) -> None:
        pretend = torch.get_device_module("pretend")
        pretend.set_device(index % 2)
        stream = pretend.Stream()
        for step in range(10):
            with pretend.stream(stream):
                weight = torch.full((4,), float(index), device="pretend", requires_grad=True)
                (weight * weight * step).sum().backward()
                host = torch.empty(4, pin_memory=True)
                host.copy_(weight.grad, non_blocking=True)
            stream.synchronize()
            if host.tolist() != [2.0 * index * step] * 4:
                wrong.append((index, step, host.tolist()))

    for seed in range(3):
        reseed(seed)
        threads = [threading.Thread(target=use, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []


def test_memory_ends_with_its_tensors() -> None:
    gc.collect()

    def blocks() -> int:
        return sum(type(thing) is Memory for thing in gc.get_objects())

    before = blocks()
    tensors = [torch.ones(10, device="pretend")[2:] for _ in range(5)]
    assert blocks() == before + 5
    del tensors
    assert blocks() == before
