"""FSDP2 over MPI: every rank holds a share of each layer's weights, gradients and optimizer state.

mpiexec -n 2 python examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import unisono

STEPS, BATCH = 100, 64

dist.init_process_group("unisono")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(images))
test, train = order[:360], order[360:]

# The 64 pixels are read as 8 rows, a sequence that the transformer looks at.
model = nn.Sequential(
    nn.Unflatten(1, (8, 8)),
    nn.Linear(8, 64),
    nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True),
    nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True),
    nn.Flatten(),
    nn.Linear(8 * 64, 10),
)
for layer in model:
    if isinstance(layer, nn.TransformerEncoderLayer):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

held = sum(parameter.to_local().numel() for parameter in model.parameters())
everything = sum(parameter.numel() for parameter in model.parameters())
if rank == 0:
    print(f"each rank holds {held:,} of {everything:,} parameters")

for step in range(STEPS):
    batch = train[torch.randint(len(train), (BATCH,))][rank::size]
    optimizer.zero_grad()
    loss = cross_entropy(model(images[batch]), labels[batch])
    loss.backward()
    optimizer.step()
    if step % 25 == 24:
        average = loss.detach()
        dist.all_reduce(average, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step + 1}: loss {average.item():.4f}")

share = test[rank::size]
with torch.no_grad():
    correct = (model(images[share]).argmax(dim=1) == labels[share]).sum()
dist.all_reduce(correct)
if rank == 0:
    print(f"accuracy {correct.item() / len(test):.3f} on {size} ranks")
dist.destroy_process_group()
