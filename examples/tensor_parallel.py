"""Tensor parallelism over MPI: every matrix is cut, and all ranks compute parts of the same batch.

mpiexec -n 2 python examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import unisono

STEPS, BATCH = 150, 64


class Block(nn.Module):
    """x + shrink(gelu(widen(norm(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shrink(nn.functional.gelu(self.widen(self.norm(x))))


dist.init_process_group("unisono")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
torch.manual_seed(0)  # the same batches everywhere

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(images))
test, train = order[:360], order[360:]

model = nn.Sequential(Block(64), Block(64), nn.Linear(64, 10))
for block in model[:2]:
    parallelize_module(block, mesh, {"widen": ColwiseParallel(), "shrink": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)
if rank == 0:
    print(f"each rank has {tuple(model[0].widen.weight.to_local().shape)} of a {tuple(model[0].widen.weight.shape)}")

for step in range(STEPS):
    batch = train[torch.randint(len(train), (BATCH,))]
    optimizer.zero_grad()
    loss = cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.4f}")

with torch.no_grad():
    accuracy = (model(images[test]).argmax(dim=1) == labels[test]).float().mean()
if rank == 0:
    print(f"accuracy {accuracy.item():.3f} on {size} ranks")
dist.destroy_process_group()
