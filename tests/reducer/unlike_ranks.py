"""Two models made parallel by ranks of which one computes without vector instructions."""

import os

if int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == 1:
    os.environ["ATEN_CPU_CAPABILITY"] = "default"

import torch

import unisono
from unisono.errors import UsageError

world = unisono.init()
for _ in range(2):
    unisono.parallel(torch.nn.Linear(3, 2), world)
refusal = ""
try:
    unisono.parallel(torch.nn.Linear(3, 2), world, virtual_ranks=2)
except UsageError as error:
    refusal = str(error)
refusals = world.all_gather_object(refusal)
if world.rank == 0:
    print(*refusals, sep="\n")
