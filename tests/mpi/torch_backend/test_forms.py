"""Every operation in every form of its tensors, on one node and as if on two, beside what it must give.

Rows are operations, columns are forms. To add one is to add its line or its letter to the table; one without is told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import unisono  # noqa: F401 - registers the backend
from unisono.errors import BackendError, MismatchError, TensorError
from unisono.placement import place
from unisono.torch_backend.mpi_job import mpi_job
from unisono.world import World

Tensors = list[torch.Tensor]

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda values: values.clone(),
    "offset": lambda values: torch.cat([values[:1].repeat(3), values])[3:],
    "strided": lambda values: torch.stack([values, values], 1).flatten()[::2],
    "transposed": lambda values: values.view(2, -1).t().contiguous().t(),
    "channels last": lambda values: values.view(1, 2, 2, -1).contiguous(memory_format=torch.channels_last),
    "leaf": lambda values: values.clone().requires_grad_(),
    "non-leaf": lambda values: values.clone().requires_grad_() * 1,
    "negative": lambda values: torch._neg_view(-values),
    "conjugated": lambda values: values.conj().clone().conj(),
}
"""The same elements, lying otherwise."""

TABLE = """
                                 in place  overlap  outputs twice  columns  inputs twice  expanded  conjugated  float8
all_reduce                       -         -        -              -        -             refused   pytorch     refused
all_reduce MAX                   -         -        -              -        -             refused   -           refused
all_reduce_coalesced             -         -        refused        right    -             refused   refused     refused
broadcast                        -         -        -              -        -             refused   pytorch     right
reduce                           -         -        -              -        -             refused   refused     refused
all_gather                       right     refused  refused        right    -             refused   pytorch     right
all_gather_single                right     refused  -              -        -             refused   pytorch     right
all_gather_coalesced             right     refused  refused        right    -             refused   right       right
all_gather_single_coalesced      right     refused  refused        right    right         refused   right       right
gather                           right     refused  refused        right    -             refused   right       right
scatter                          right     refused  -              -        right         refused   pytorch     right
reduce_scatter                   right     right    -              -        right         refused   refused     refused
reduce_scatter_single            right     refused  -              -        -             refused   refused     refused
reduce_scatter_single_coalesced  right     refused  refused        right    right         refused   refused     refused
all_to_all                       right     refused  refused        right    right         refused   pytorch     right
all_to_all_single                refused   refused  -              -        -             refused   pytorch     right
all_to_all_single, uneven        refused   refused  -              -        -             refused   pytorch     right
send, recv                       -         -        -              -        -             refused   pytorch     right
World.allreduce                  -         -        -              -        -             refused   refused     refused
World.broadcast                  -         -        -              -        -             refused   right       right
World.reduce                     -         -        -              -        -             refused   refused     refused
World.reduce_scatter             -         -        -              -        -             -         refused     refused
World.all_gather                 right     refused  -              -        -             refused   right       right
World.all_to_all                 -         -        -              -        -             -         right       right
World.all_to_all_v               right     refused  refused        right    right         refused   right       right
"""
"""What an operation does in a form: "right", "refused" by us, by "pytorch" before we see it; - for no such form.

Every operation is right in the other layouts, empty and with each dtype of DTYPES."""

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]

ALONE = [(name, "outputs twice") for name in ("all_gather", "gather", "all_to_all", "World.all_to_all_v")]
ALONE += [(name, "expanded") for name in ("broadcast", "World.broadcast")]
"""What one rank by itself does not have: two outputs, or somebody to receive from."""

NO_ROWS = [
    (name, layout)
    for name in ("all_to_all_single", "all_to_all_single, uneven")
    for layout in ("transposed", "channels last")
]
"""Layouts whose first dimension is shorter than there may be ranks."""

ROOTED = ("broadcast", "reduce", "gather", "scatter")

WORDS = {"refused": "share memory|cannot reduce a tensor of", "pytorch": "view_as_real"}

CPU = torch.device("cpu")

N = 8
"""Elements of a tensor, or of a rank's chunk of it."""


class Place(NamedTuple):
    """Where an operation takes place."""

    me: int
    size: int
    group: dist.ProcessGroup
    world: World


class Operation(NamedTuple):
    """An operation, by the lengths of its tensors on a rank, and what all ranks must find in its outputs."""

    call: Callable[[Place, Tensors, Tensors], Tensors | None]
    """Fills the outputs, the inputs where there are none, or returns others."""
    want: Callable[[int, list[Tensors]], Tensors]
    """What a rank must find, by what each rank has put in."""
    inputs: Callable[[int, int], list[int]] = lambda me, size: [N]
    outputs: Callable[[int, int], list[int]] = lambda me, size: []
    own: Callable[[int, int], tuple[int, int]] = lambda me, size: (0, 0)
    """The output and the input that may be one."""


def total(tensors: Tensors) -> torch.Tensor:
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    return torch.stack([tensor.to(wide) for tensor in tensors]).sum(0).to(tensors[0].dtype)


def summed(me: int, given: list[Tensors]) -> Tensors:
    return [total(list(each)) for each in zip(*given, strict=True)]


def at_last(want: Callable[[int, list[Tensors]], Tensors]) -> Callable[[int, list[Tensors]], Tensors]:
    """On the last rank that, on the others what they had."""
    return lambda me, given: want(me, given) if me == len(given) - 1 else given[me]


def of_all(me: int, given: list[Tensors]) -> Tensors:
    return [tensor for tensors in given for tensor in tensors]


def side_by_side(me: int, given: list[Tensors]) -> Tensors:
    return [torch.cat(each) for each in zip(*given, strict=True)]


def own_chunk(me: int, given: list[Tensors]) -> Tensors:
    return [tensor.chunk(len(given))[me] for tensor in summed(me, given)]


def swapped(me: int, given: list[Tensors]) -> Tensors:
    return [torch.cat([tensors[0].chunk(len(given))[me] for tensors in given])]


def ring(at: Place, outputs: Tensors, inputs: Tensors) -> None:
    """Each rank to the next; a rank may send to itself."""
    work = dist.irecv(outputs[0], (at.me - 1) % at.size, at.group)
    dist.isend(inputs[0], (at.me + 1) % at.size, at.group).wait()
    work.wait()


def uneven(at: Place, outputs: Tensors, inputs: Tensors) -> None:
    counts = [len(inputs[0]) // at.size] * at.size
    dist.all_to_all_single(outputs[0], inputs[0], counts, counts, group=at.group)


def last(at: Place) -> int:
    return at.size - 1


def one_each(me: int, size: int) -> list[int]:
    return [N] * size


def all_ranks(me: int, size: int) -> list[int]:
    return [N * size]


def at_root(me: int, size: int) -> list[int]:
    return [N] * size if me == size - 1 else []


def two(lengths: Callable[[int, int], list[int]]) -> Callable[[int, int], list[int]]:
    return lambda me, size: 2 * lengths(me, size)


def one(me: int, size: int) -> list[int]:
    return [N]


def gather_two(at: Place, outputs: Tensors, inputs: Tensors) -> None:
    rows = [outputs[2 * rank : 2 * rank + 2] for rank in range(at.size)]
    at.group.allgather_coalesced(rows, inputs).wait()


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(lambda at, _, i: dist.all_reduce(i[0], group=at.group), summed),
    "all_reduce MAX": Operation(
        lambda at, _, i: dist.all_reduce(i[0], dist.ReduceOp.MAX, at.group),
        lambda me, given: [torch.stack([tensors[0].double() for tensors in given]).amax(0).to(given[0][0].dtype)],
    ),
    "all_reduce_coalesced": Operation(lambda at, _, i: at.group.allreduce_coalesced(i).wait(), summed, inputs=two(one)),
    "broadcast": Operation(lambda at, _, i: dist.broadcast(i[0], last(at), at.group), lambda me, given: given[-1]),
    "reduce": Operation(lambda at, _, i: dist.reduce(i[0], last(at), group=at.group), at_last(summed)),
    "all_gather": Operation(
        lambda at, o, i: dist.all_gather(o, i[0], at.group), of_all, outputs=one_each, own=lambda me, size: (me, 0)
    ),
    "all_gather_single": Operation(
        lambda at, o, i: dist.all_gather_single(o[0], i[0], at.group), side_by_side, outputs=all_ranks
    ),
    "all_gather_coalesced": Operation(gather_two, of_all, two(one), two(one_each), own=lambda me, size: (2 * me, 0)),
    "all_gather_single_coalesced": Operation(
        lambda at, o, i: at.group.allgather_into_tensor_coalesced(o, i).wait(), side_by_side, two(one), two(all_ranks)
    ),
    "gather": Operation(
        lambda at, o, i: dist.gather(i[0], o or None, last(at), at.group),
        lambda me, given: of_all(me, given) if me == len(given) - 1 else [],
        outputs=at_root,
        own=lambda me, size: (me, 0),
    ),
    "scatter": Operation(
        lambda at, o, i: dist.scatter(o[0], i or None, last(at), at.group),
        lambda me, given: [given[-1][me]],
        at_root,
        one,
        own=lambda me, size: (0, me),
    ),
    "reduce_scatter": Operation(
        lambda at, o, i: dist.reduce_scatter(o[0], i, group=at.group),
        lambda me, given: [summed(me, given)[me]],
        one_each,
        one,
        own=lambda me, size: (0, me),
    ),
    "reduce_scatter_single": Operation(
        lambda at, o, i: dist.reduce_scatter_single(o[0], i[0], group=at.group), own_chunk, all_ranks, one
    ),
    "reduce_scatter_single_coalesced": Operation(
        lambda at, o, i: at.group.reduce_scatter_tensor_coalesced(o, i).wait(), own_chunk, two(all_ranks), two(one)
    ),
    "all_to_all": Operation(
        lambda at, o, i: dist.all_to_all(o, i, at.group),
        lambda me, given: [tensors[me] for tensors in given],
        one_each,
        one_each,
        own=lambda me, size: (me, me),
    ),
    "all_to_all_single": Operation(
        lambda at, o, i: dist.all_to_all_single(o[0], i[0], group=at.group), swapped, all_ranks, all_ranks
    ),
    "all_to_all_single, uneven": Operation(uneven, swapped, all_ranks, all_ranks),
    "send, recv": Operation(ring, lambda me, given: given[me - 1], outputs=one),
    "World.allreduce": Operation(lambda at, _, i: [at.world.allreduce(i[0])], summed),
    "World.broadcast": Operation(lambda at, _, i: [at.world.broadcast(i[0], last(at))], lambda me, given: given[-1]),
    "World.reduce": Operation(lambda at, _, i: at.world.reduce(i[0], last(at)), at_last(summed)),
    "World.reduce_scatter": Operation(lambda at, _, i: [at.world.reduce_scatter(i[0])], own_chunk, all_ranks),
    "World.all_gather": Operation(lambda at, o, i: [at.world.all_gather(i[0], o[0])], side_by_side, outputs=all_ranks),
    "World.all_to_all": Operation(lambda at, _, i: [at.world.all_to_all(i[0])], swapped, all_ranks),
    "World.all_to_all_v": Operation(
        lambda at, o, i: at.world.all_to_all_v(i, o),
        lambda me, given: [tensors[me] for tensors in given],
        one_each,
        one_each,
        own=lambda me, size: (me, me),
    ),
}


def table() -> dict[str, dict[str, str]]:
    """TABLE by operation and form."""
    heads, *lines = (re.split(r"\s{2,}", line.strip()) for line in TABLE.strip().splitlines())
    return {name: dict(zip(heads, cells, strict=True)) for name, *cells in lines}


def values(rank: int, index: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements of a rank's tensor of that number: small whole numbers, whose sums are exact in every dtype."""
    numbers = (torch.arange(length) * 3 + 5 * rank + 7 * index) % 4
    return torch.complex(numbers.float(), numbers + 1.0) if dtype.is_complex else numbers.to(dtype)


def given(operation: Operation, form: str, rank: int, size: int, length: int, dtype: torch.dtype) -> Tensors:
    """The inputs of a rank, plain."""
    lengths = [each // N * length for each in operation.inputs(rank, size)]
    return [values(rank, 0 if form == "inputs twice" else index, each, dtype) for index, each in enumerate(lengths)]


def prepare(
    operation: Operation, form: str, at: Place, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensors, Tensors]:
    """The outputs and inputs of this rank in that form."""
    lay = LAYOUTS.get(form, LAYOUTS["plain"])
    inputs = [lay(tensor.to(device)) for tensor in given(operation, form, at.me, at.size, length, dtype)]
    lengths = [each // N * length for each in operation.outputs(at.me, at.size)]
    outputs = [lay(values(0, 0, each, dtype).to(device)) for each in lengths]
    filled = outputs or inputs
    own, source = operation.own(at.me, at.size)
    if form in ("in place", "overlap") and outputs and inputs:
        outputs[own], inputs[source] = SHARING[form](outputs[own], inputs[source], at.me)
    if form == "outputs twice":
        filled[:2] = filled[:1] * len(filled[:2])
    if form == "columns":
        filled[:] = torch.stack(filled, 1).unbind(1)
    if form == "inputs twice":
        inputs[:] = inputs[:1] * len(inputs)
    if form == "expanded":
        filled[0] = filled[0][:1].expand(filled[0].shape)
    return outputs, inputs


def in_place(output: torch.Tensor, source: torch.Tensor, me: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The shorter is this rank's chunk of the longer."""
    if len(output) <= len(source):
        return source[me * N :][: len(output)] if len(output) < len(source) else source, source
    output[me * N : (me + 1) * N] = source
    return output, output[me * N : (me + 1) * N]


def overlap(output: torch.Tensor, source: torch.Tensor, me: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The output begins one element before the source."""
    memory = torch.cat([source[:1], source, output])
    return memory[: len(output)], memory[1 : 1 + len(source)]


SHARING = {"in place": in_place, "overlap": overlap}


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes of the elements."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8).tolist()  # type: ignore[no-any-return]


def outcome(
    operation: Operation,
    form: str,
    at: Place,
    length: int = N,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
) -> str:
    """What comes of an operation in a form: "right", or the kind of WORDS that it raises, or what is wrong."""
    outputs, inputs = prepare(operation, form, at, length, dtype, device)
    want = operation.want(at.me, [given(operation, form, rank, at.size, length, dtype) for rank in range(at.size)])
    try:
        returned = operation.call(at, outputs, inputs)
    except (RuntimeError, TensorError, MismatchError) as error:
        return next((kind for kind, pattern in WORDS.items() if re.search(pattern, str(error))), f"raises {error}")
    got = returned if isinstance(returned, list) else outputs or inputs
    if want and list(map(bits, got)) != list(map(bits, want)):
        return f"gives {got}, not {want}"
    return "right"


@pytest.fixture(scope="module")
def default_group() -> Iterator[None]:
    dist.init_process_group("unisono")
    yield
    dist.destroy_process_group()


@pytest.fixture(params=[1, 2], ids=["one node", "as if on two"])
def find_place(request: pytest.FixtureRequest, world: World, default_group: None) -> Callable[[], Place]:
    """Groups of all ranks, new ones each time."""
    nodes = [rank % request.param for rank in range(world.size)]

    def find() -> Place:
        comm, shared = world.comm.Dup(), mpi_job()
        apart, before = World(comm, place(nodes), world.table), shared.world
        shared.world = apart  # new groups sit where it says
        try:
            group = dist.new_group(list(range(world.size)))
        finally:
            shared.world = before
        assert group is not None
        return Place(world.rank, world.size, group, apart)

    return find


def test_the_table_has_every_operation_and_form() -> None:
    assert set(table()) == set(OPERATIONS)
    assert all({*cells.values()} <= {"right", "-", *WORDS} for cells in table().values())


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_form(name: str, find_place: Callable[[], Place]) -> None:
    at, operation = find_place(), OPERATIONS[name]
    if name == "send, recv" and at.size == 1:
        pytest.skip("one rank has nobody to write to")
    results, expected = {}, {}
    for form in LAYOUTS:
        if form != "conjugated" and (name, form) not in NO_ROWS:
            expected[form], results[form] = "right", outcome(operation, form, at)
    expected["empty"], results["empty"] = "right", outcome(operation, "plain", at, length=0)
    for dtype in DTYPES:
        expected[str(dtype)], results[str(dtype)] = "right", outcome(operation, "plain", at, dtype=dtype)
    for form, cell in table()[name].items():
        if cell == "-" or (at.size == 1 and (name, form) in ALONE):
            continue
        dtype = {"conjugated": torch.complex64, "float8": torch.float8_e4m3fn}.get(form, torch.float64)
        expected[form], results[form] = cell, outcome(operation, form, at, dtype=dtype)
        if cell == "refused" and at.world.nodes > 1 and name.removeprefix("World.") in ROOTED:
            at = find_place()  # only some ranks refuse: groups across nodes have ended
    assert results == expected


def test_tensors_of_a_device(find_place: Callable[[], Place], device: torch.device) -> None:
    at = find_place()
    for name, operation in OPERATIONS.items():
        if name.startswith("World.") or (name == "send, recv" and at.size == 1):
            continue
        forms = ["plain", "strided", "non-leaf", "negative"] + ["in place"] * (table()[name]["in place"] == "right")
        results = {form: outcome(operation, form, at, device=device) for form in forms}
        assert results == dict.fromkeys(forms, "right"), name


def test_an_operation_on_a_device_is_behind_what_was_computed_and_before_what_follows(
    find_place: Callable[[], Place], device: torch.device
) -> None:
    at, tensor, other = find_place(), torch.zeros(1000, device=device), torch.zeros(3, device=device)
    streams = torch.get_device_module(device)
    streams.synchronize()
    with streams.stream(streams.Stream(device)):
        for _ in range(5):
            tensor.add_(1)
            work = dist.all_reduce(tensor, group=at.group, async_op=True)
            other.add_(1)
            future = dist.all_reduce(other, group=at.group, async_op=True).get_future()
            work.wait()
            tensor.div_(at.size)
            future.wait()
            other.div_(at.size)
        assert tensor.tolist() == [5.0] * 1000
        assert other.tolist() == [5.0] * 3


def test_an_error_of_one_rank_reaches_all(find_place: Callable[[], Place]) -> None:
    at = find_place()
    if at.size == 1:
        pytest.skip("one rank has no others")
    outputs = [torch.zeros(3) for _ in range(at.size)]
    message = r"rank 1.*all_gather.*output 1 and output 0 share memory"
    if at.me == 1:
        outputs[1] = outputs[0]
    with pytest.raises(BackendError, match=message) as reported:
        dist.all_gather(outputs, torch.ones(3), at.group)
    assert isinstance(reported.value.__cause__, TensorError if at.me == 1 else MismatchError)
    dist.barrier()


def sparse(rows: int, columns: int, dimensions: int = 1) -> torch.Tensor:
    """A sparse tensor with elements in its last row, and indices of that many dimensions."""
    dense = torch.zeros(rows, columns)
    dense[-1] = 1
    return dense.to_sparse(dimensions)


SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG

DIFFERING: dict[str, Callable[[Place, bool], object]] = {
    "all_reduce, averaged": lambda at, first: dist.all_reduce(torch.ones(2), SUM if first else AVG, at.group),
    "all_reduce, factors": lambda at, first: dist.all_reduce(
        torch.ones(2), SUM if first else dist._make_nccl_premul_sum(2.0), at.group
    ),
    "reduce": lambda at, first: dist.reduce(torch.ones(2), 0, SUM if first else AVG, at.group),
    "reduce_scatter": lambda at, first: dist.reduce_scatter_single(
        torch.ones(2), torch.ones(2 * at.size), SUM if first else AVG, at.group
    ),
    "coalesced": lambda at, first: at.group.allreduce_coalesced(
        [torch.ones(2), torch.ones(4)] if first else [torch.ones(4), torch.ones(2)]
    ).wait(),
    "sparse, shape": lambda at, first: dist.all_reduce(sparse(9 if first else 5, 4), SUM, at.group),
    "sparse, dimensions": lambda at, first: dist.all_reduce(sparse(4, 4, 2 if first else 1), SUM, at.group),
    "sparse, averaged": lambda at, first: dist.all_reduce(sparse(4, 4), SUM if first else AVG, at.group),
}
"""Operations of which rank 0 makes another one than the others."""


@pytest.mark.parametrize("name", DIFFERING)
def test_every_rank_raises_where_reductions_differ(name: str, differing: None, find_place: Callable[[], Place]) -> None:
    at = find_place()
    if at.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(BackendError) as reported:
        DIFFERING[name](at, at.me == 0)
    assert isinstance(reported.value.__cause__, MismatchError)


def test_one_rank_s_negative_bit(find_place: Callable[[], Place]) -> None:
    at = find_place()
    for op, result in {"sum": at.size - 4.0, "maximum": 1.0 if at.size > 1 else -3.0}.items():
        for _ in range(3):
            tensor = torch._neg_view(torch.full((1,), 3.0)) if at.me == 0 else torch.ones(1)
            at.world.allreduce(tensor, op=op)
            assert tensor.tolist() == [result]
