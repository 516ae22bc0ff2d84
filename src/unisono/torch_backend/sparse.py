"""Sum of sparse tensors: each rank sends its elements to all ranks, and adds up all of them in the order of ranks.

rank 0   3:a 7:b            all ranks   3:a+c 7:b 9:d           bytes received: those of all others' elements
rank 1   3:c 9:d
"""

from __future__ import annotations

import torch

from unisono.collectives.all_gather import all_gather
from unisono.collectives.all_gather_v import all_gather_v
from unisono.collectives.checks import Checks
from unisono.collectives.group import Group
from unisono.errors import TensorError
from unisono.torch_backend.reductions import Reduction


def allreduce_sparse(group: Group, tensor: torch.Tensor, reduction: Reduction) -> None:
    """Sum a sparse COO tensor over all ranks, in place. Raises TensorError for other reductions and layouts."""
    with Checks(group, "all_reduce"):
        if reduction.op != "sum" or tensor.layout is not torch.sparse_coo:
            raise TensorError(f"rank {group.rank}: a {tensor.layout} tensor can only be summed, and only as sparse COO")
    own = reduction.before(tensor.detach(), copy=True).coalesce()
    counts = torch.empty(group.size, dtype=torch.int64)
    all_gather(group, torch.tensor([own._nnz()]), counts)
    lengths = counts.tolist()
    indices = [own.indices().new_empty(own.indices().shape[0], length) for length in lengths]
    values = [own.values().new_empty(length, *own.values().shape[1:]) for length in lengths]
    all_gather_v(group, own.indices(), indices)
    all_gather_v(group, own.values(), values)
    total = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), tensor.shape).coalesce()
    reduction.after(total, group.size)
    with torch.no_grad():
        tensor.copy_(total)  # into the tensor itself: a detached one would get indices of its own
