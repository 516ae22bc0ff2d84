"""Serial references, for tests and for authors of rules and schedules: any number of ranks in one process, without MPI.

    play_in_process     trains replicas of all ranks by a rule         Batch, InProcessReplica
    serve_in_order      the same by a rule with servers, in given orders of the exchanges
    play_all            plays the programs of a schedule on payloads, a thread for each rank
    pretend             a module with a PyTorch device, for tests of streams where there is no accelerator
    pretend_backend     the same with a backend of torch.distributed for it, as NCCL is CUDA's

Nothing here is fast: the plainest form is the oracle of the fast one.
"""

from unisono.testing.play import play_all, play_in_process, serve_in_order
from unisono.testing.replica import Batch, InProcessReplica

__all__ = ["Batch", "InProcessReplica", "play_all", "play_in_process", "serve_in_order"]
