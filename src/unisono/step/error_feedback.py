"""Sum of quantized tensors over all ranks, with error feedback: what rounding leaves out is added the next time.

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

from typing import Any

import torch

from unisono.schedules.pieces import bounds
from unisono.step.replica import RESIDUAL, SUM_RESIDUAL, RuleMemory
from unisono.wires.wire import Wire


def sum_with_feedback(flat: torch.Tensor, wire: Wire, kept: RuleMemory, key: int, world: Any) -> None:
    """Replace `flat` by its sum over the ranks of `world`, as a wire rounds it. `kept` has the residuals of `key`.

    `flat` is a float32 or float64 tensor of one dimension, contiguous, of the same length on all ranks.
    """
    chunks = [flat[slice(*bounds(len(flat), world.size, rank))] for rank in range(world.size)]
    residual = kept.or_zeros(RESIDUAL, key, flat)
    flat.add_(residual)
    residual.copy_(flat)
    size = wire.nbytes(max(map(len, chunks)))
    parcels = _encode(chunks, wire, size)
    residual.sub_(flat)
    received = world.all_to_all(parcels.view(-1), "direct").view(world.size, size)
    mine = chunks[world.rank]
    mine.zero_()
    part = mine.new_empty(mine.shape)
    for row in received:
        _decode(row, wire, part)
        mine.add_(part)
    own_residual = kept.or_zeros(SUM_RESIDUAL, key, mine)
    mine.add_(own_residual)
    own_residual.copy_(mine)
    summed = parcels.new_zeros(world.size * size)
    own = summed[world.rank * size : (world.rank + 1) * size]
    own.copy_(_encode([mine], wire, size)[0])
    own_residual.sub_(mine)
    world.all_gather(own, summed, "direct")
    for row, chunk in zip(summed.view(world.size, size), chunks, strict=True):
        _decode(row, wire, chunk)


def _encode(chunks: list[torch.Tensor], wire: Wire, size: int) -> torch.Tensor:
    """Return a row of `size` bytes for each chunk, and set the chunks to the numbers that are sent."""
    parcels = torch.zeros(len(chunks), size, dtype=torch.uint8)
    for row, chunk in zip(parcels, chunks, strict=True):
        wire.encode(chunk.numpy(), row[: wire.nbytes(len(chunk))].numpy())
    return parcels


def _decode(row: torch.Tensor, wire: Wire, chunk: torch.Tensor) -> None:
    """Set a chunk to the numbers that a row of bytes encodes."""
    wire.decode(row[: wire.nbytes(len(chunk))].numpy(), chunk.numpy())
