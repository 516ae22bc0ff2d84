"""Hugging Face Accelerate over MPI.

mpiexec -n 2 python examples/accelerate_run.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import unisono

EPOCHS = 8

# For processors Accelerate knows gloo alone, but it takes a process group that is there as it is.
dist.init_process_group("unisono")
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
train, test = random_split(digits, [0.8, 0.2])

network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model, optimizer, batches, test_batches = accelerator.prepare(
    network,
    torch.optim.Adam(network.parameters(), lr=3e-3),
    DataLoader(train, batch_size=32, shuffle=True),
    DataLoader(test, batch_size=32),
)

for epoch in range(EPOCHS):
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    average = accelerator.reduce(torch.stack(losses).mean(), reduction="mean")
    accelerator.print(f"epoch {epoch + 1}: loss {average.item():.4f}")

correct = 0
with torch.no_grad():
    for inputs, targets in test_batches:
        guesses, truth = accelerator.gather_for_metrics((model(inputs).argmax(dim=1), targets))
        correct += (guesses == truth).sum().item()
accelerator.print(f"accuracy {correct / len(test):.3f} on {accelerator.num_processes} ranks")
accelerator.end_training()
