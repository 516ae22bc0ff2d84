"""Operations and tasks of an outer step: ranks exchange the change of their weights since the last outer step.

    step s        update ─ pack_change k ─┐                                 a    anchor: weights after the last outer
    communication               exchange_change k ═════════════╗                 step, the same on all ranks
    step s + d    update ─────────────────────── outer_step k ─╝            w    this rank's weights

    pack_change       bucket = (a - w) / ranks;  sent = w
    exchange_change   bucket = sum over ranks = the mean change D, in a wire format with error feedback
    outer_step        v = momentum v + D;  a = a - rate (D + momentum v)    as torch.optim.SGD(nesterov=True) does
                      w = a + (w - sent)                                    the progress since it was sent stays

With d = 0 the weights become the anchor, exactly. With d > 0 the exchange runs beside d inner steps, whose progress is
added to the new anchor (`docs/rules.md` compares it with Streaming DiLoCo, which mixes).

Quantized changes are summed with error feedback: what rounding leaves out is added the next time.

    rank r   x = change + residual          q = round(x), chunk by chunk       residual = x - q
             chunk c of q  ──all_to_all──▶  rank c: s = sum of the q, in the order of ranks
    rank c   y = s + sum_residual           t = round(y)                       sum_residual = y - t
             t  ──all_gather──▶  every rank: the same bits

So each number is quantized once for the sum and once for the result, and what was applied, with all residuals, is the
sum of all changes: nothing is lost, some of it is late. The two collectives have the rounds and the bytes of `direct`:
2 rounds, 2 n (p - 1) / p bytes sent by each rank, where n is the encoded size. Encoded bytes are sent, so the result
does not depend on the transport: ranks of one node get the same bits as ranks of several. Sources: 1-bit SGD (Seide et
al. 2014) for the feedback, Karimireddy et al. (arXiv:1901.09847) for its convergence, DoubleSqueeze (Tang et al.,
arXiv:1905.05957) for feedback on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from unisono.errors import StepError
from unisono.schedules.pieces import bounds
from unisono.step import build
from unisono.step.costs import Costs, Duration, whole_exchange
from unisono.step.layout import Layout
from unisono.step.operations import allreduce, price_pack, price_unpack
from unisono.step.overlaps import CollectiveTasks
from unisono.step.program import UPDATE, Operation, Role, Task, Value, weights
from unisono.step.replica import ANCHOR, MOMENTUM, RESIDUAL, SENT, SUM_RESIDUAL, Replica, RuleMemory
from unisono.step.symbolic_state import Contents, Contribution, Stage, Sum, SymbolicState, each
from unisono.wires import wire_of

if TYPE_CHECKING:
    import torch

    from unisono.wires.wire import Wire

change = partial(Value, "change")
"""Memory of a bucket while it holds a change of weights, in flight over steps."""

anchor = partial(Value, "anchor")
"""Anchor of a bucket's weights, and the state of the outer optimizer."""


def begin_exchange(layout: Layout, sends: CollectiveTasks, keys: Iterable[int], exchange: Operation) -> Iterator[Task]:
    """Yield the tasks that send the changes of some buckets. Control messages precede them in the program."""
    for key in keys:
        bucket_weights = tuple(map(weights, layout.bucket(key).parameters))
        yield Task(PACK_CHANGE, key, UPDATE, (build.CONTROL, anchor(key), *bucket_weights), (change(key),))
        yield from sends.place(exchange, key, (), (change(key),))


def take_outer_step(layout: Layout, keys: Iterable[int], step: Operation) -> Iterator[Task]:
    """Yield the tasks that apply the mean changes of some buckets, once they are there."""
    for key in keys:
        bucket_weights = map(weights, layout.bucket(key).parameters)
        yield Task(step, key, UPDATE, (), (change(key), anchor(key), *bucket_weights))


def _act_pack_change(replica: Replica, task: Task, _: Any) -> None:
    now = replica.read_weights(task.key)
    replica.kept[SENT, task.key] = now
    replica.fill_bucket(task.key, (replica.kept[ANCHOR, task.key] - now).div_(replica.layout.ranks))


@each
def _pack_change(state: SymbolicState, task: Task) -> None:
    parts: dict[int, Sum] = {}
    for parameter in state.layout.bucket(task.key).parameters:
        part, now = (parameter, task.key), state.weights[parameter][task.key]
        if part in state.sent:
            early = "before the outer step that applies the last one"
            raise state.error(task, f"packs a change of parameter {parameter} {early}")
        state.sent[part] = now
        version = state.versions.of("change", state.anchor(part), now)
        parts[parameter] = Counter({Contribution(state.rank, -1, version): 1})
    state.buckets[task.key] = Contents(Stage.CHANGE, parts, state.layout.ranks)


def _exchange_change(ranks: Sequence[SymbolicState], task: Task) -> None:
    for parameter in ranks[0].layout.bucket(task.key).parameters:
        for state in ranks:
            if state.anchor((parameter, task.key)) != ranks[0].anchor((parameter, task.key)):
                raise StepError(
                    f"{task} sums changes of parameter {parameter} from different anchors on ranks {ranks[0].rank} and "
                    f"{state.rank}"
                )
    allreduce().symbolic(ranks, task)


@each
def _outer_step(state: SymbolicState, task: Task) -> None:
    for parameter, contributions in state.take_means(task, Stage.CHANGE).items():
        part = parameter, task.key
        version = state.versions.of("outer", state.anchor(part), frozenset(contributions.items()))
        now, sent = state.weights[parameter][task.key], state.sent.pop(part)
        state.anchors[part] = version
        later = version if now == sent else state.versions.of("progress", version, sent, now)
        state.weights[parameter][task.key] = later
    state.outer_steps[task.key] += 1


def _price_read(task: Task, costs: Costs) -> Duration:
    """Return the duration of the copy of a bucket's weights from a device, for which the host waits."""
    return price_pack(task, costs) if costs.computing.streams else Duration(0.0)


def _price_outer(task: Task, costs: Costs) -> Duration:
    """Return the duration of that copy and of the one back, around the outer step on the host."""
    back = price_unpack(task, costs).seconds if costs.computing.streams else 0.0
    return Duration(_price_read(task, costs).seconds + back)


PACK_CHANGE = Operation("pack_change", _act_pack_change, _pack_change, _price_read, letter="p")
"""Copy of the change of weights since the last outer step, divided by the number of ranks, into their bucket."""


@cache
def exchange_change(algorithm: str = "auto", wire: str | None = None) -> Operation:
    """Return the operation that sums changes over the ranks. With a wire it quantizes them, with error feedback, but
    for "exact", which rounds once, to integers."""

    def act(replica: Replica, task: Task, world: Any) -> None:
        flat = replica.bucket(task.key)
        if (encoding := wire_of(wire, flat.dtype)) is None:
            world.allreduce(flat, algorithm, wire)
        else:
            sum_with_feedback(flat, encoding, replica.kept, task.key, world)

    return Operation("exchange_change", act, _exchange_change, whole_exchange, Role.COLLECTIVE, "x")


def sum_with_feedback(flat: torch.Tensor, wire: Wire, kept: RuleMemory, key: int, world: Any) -> None:
    """Replace `flat` by its sum over the ranks of `world`, as a wire rounds it. `kept` has the residuals of `key`.

    `flat` is a float32 or float64 tensor of one dimension, contiguous, of the same length on all ranks.
    """
    import torch  # noqa: PLC0415  recipes are checked without PyTorch

    chunks = [flat[slice(*bounds(len(flat), world.size, rank))] for rank in range(world.size)]
    residual, own_chunk = kept.or_zeros(RESIDUAL, key, flat), chunks[world.rank]
    flat.add_(residual)
    residual.copy_(flat)
    parcels = torch.zeros(world.size, wire.nbytes(max(map(len, chunks))), dtype=torch.uint8, device="cpu")
    _encode(chunks, wire, parcels)
    residual.sub_(flat)
    received = world.all_to_all(parcels.view(-1), "direct").view(parcels.shape)
    own_chunk.zero_()
    part = own_chunk.new_empty(own_chunk.shape)
    for row in received:
        _decode(row, wire, part)
        own_chunk.add_(part)
    own_residual = kept.or_zeros(SUM_RESIDUAL, key, own_chunk)
    own_chunk.add_(own_residual)
    own_residual.copy_(own_chunk)
    summed = torch.zeros_like(parcels)
    _encode([own_chunk], wire, summed[world.rank :])
    own_residual.sub_(own_chunk)
    world.all_gather(summed[world.rank], summed.view(-1), "direct")
    for row, chunk in zip(summed, chunks, strict=True):
        _decode(row, wire, chunk)


def _encode(chunks: Sequence[torch.Tensor], wire: Wire, parcels: torch.Tensor) -> None:
    """Write each chunk into a row of bytes, and set the chunks to the numbers that are sent."""
    for row, chunk in zip(parcels, chunks, strict=False):
        wire.encode(chunk.numpy(), row[: wire.nbytes(len(chunk))].numpy())


def _decode(row: torch.Tensor, wire: Wire, chunk: torch.Tensor) -> None:
    """Set a chunk to the numbers that a row of bytes encodes."""
    wire.decode(row[: wire.nbytes(len(chunk))].numpy(), chunk.numpy())


@cache
def outer_step(rate: float, momentum: float, nesterov: bool) -> Operation:
    """Return the operation that moves the anchor along the mean change, and the weights with it."""

    def act(replica: Replica, task: Task, _: Any) -> None:
        key, kept = task.key, replica.kept
        if (SENT, key) not in kept:  # dropped where a run resumed in other buckets: it goes with the next change
            return
        direction = replica.bucket(key)
        if momentum:
            velocity = kept.or_zeros(MOMENTUM, key, direction)
            velocity.mul_(momentum).add_(direction)
            direction = direction + momentum * velocity if nesterov else velocity
        moved = kept[ANCHOR, key].sub_(direction, alpha=rate)
        replica.write_weights(key, replica.read_weights(key).sub_(kept.pop((SENT, key))).add_(moved))

    return Operation("outer_step", act, _outer_step, _price_outer, letter="o")
