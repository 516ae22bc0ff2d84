"""DistributedDataParallel over MPI: a network learns handwritten digits, each rank from a share of them.

mpiexec -n 2 python examples/ddp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import unisono

EPOCHS = 8

dist.init_process_group("unisono")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, test = random_split(digits, [0.8, 0.2])
sampler = DistributedSampler(train)
batches = DataLoader(train, batch_size=64 // size, sampler=sampler)

network = nn.Sequential(
    nn.Unflatten(1, (1, 8, 8)),
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64 * 4 * 4, 10),
)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch + 1}: loss {total.item() / len(batches):.4f}")

correct = torch.zeros(())
with torch.no_grad():
    for inputs, targets in DataLoader(test, batch_size=64, sampler=range(rank, len(test), size)):
        correct += (network(inputs).argmax(dim=1) == targets).sum()
dist.all_reduce(correct)
if rank == 0:
    print(f"accuracy {correct.item() / len(test):.3f} on {size} ranks")
dist.destroy_process_group()
