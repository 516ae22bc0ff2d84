from pathlib import Path

import torch

from unisono.world import World


def test_no_named_files_in_shared_memory(world: World) -> None:
    world.allreduce(torch.ones(3))
    world.barrier()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/mpich_shm_" in line]
    assert all(line.endswith("(deleted)") for line in mapped)


def test_each_rank_has_its_share_of_threads(world: World) -> None:
    import os

    from unisono.binding import COMMUNICATION_CORE_FROM, core_locations
    from unisono.launch import available_cores

    cores = available_cores()
    real = len({*core_locations(cores).values()}) or len(cores)
    sizes = [real // world.size + (rank < real % world.size) for rank in range(world.size)]
    expected = [max(1, size - (size >= COMMUNICATION_CORE_FROM and world.size > 1)) for size in sizes]
    if "OMP_NUM_THREADS" not in os.environ:  # and all may use the same cores here
        assert sorted(world.all_gather_object(torch.get_num_threads())) == sorted(expected)


def test_barrier_with_unequal_numbers_of_cores(world: World) -> None:
    import os

    from unisono.launch import available_cores

    before = available_cores()
    if world.rank == 0:
        os.sched_setaffinity(0, {min(before)})
    group = world.split(0)
    try:
        tensor = torch.ones(5)
        group.allreduce(tensor)
        assert torch.equal(tensor, torch.full((5,), float(world.size)))
    finally:
        group.free()
        os.sched_setaffinity(0, before)
