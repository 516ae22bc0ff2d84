"""What every rank runs: PyTorch's own tests of torch.distributed, one after the other, against one backend.

mpiexec -n RANKS python conformance/suite.py BACKEND PORT        run.py does this; its store listens on PORT

The suite lies in PyTorch's wheel. It chooses its cases by the backend's name: decorators, while it is imported. So the
name is gloo's until then, and every backend meets gloo's cases. From there on the suite is told the true name.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from outcomes import SKIPPED, Outcome, attempt

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
REFERENCE = "gloo"
KEPT_FOR_MPI = "Only MPI supports"
"""How reasons to skip begin that PyTorch gives for all_to_all on CPUs, which gloo has learned since."""


def load(backend: str, ranks: int, profiling: bool = True) -> ModuleType:
    """The module of PyTorch's tests with gloo's cases chosen, ready to be run against a backend.

    The suite lists the backends whose operations are to show in PyTorch's profiler, gloo among them: `profiling` adds
    the backend to the lists.
    """
    file_method = "file:///each/test/has/its/own"  # decorators want to see a file, as in PyTorch's own runs
    os.environ.update(BACKEND=REFERENCE, WORLD_SIZE=str(ranks), INIT_METHOD=file_method, MASTER_ADDR="127.0.0.1")
    os.environ.update(CUDA_VISIBLE_DEVICES="", TORCH_SHOW_CPP_STACKTRACES="1")
    from torch.testing._internal.distributed import distributed_test  # noqa: PLC0415 - reads the environment

    os.environ["BACKEND"] = distributed_test.BACKEND = backend
    if profiling and backend != REFERENCE:
        distributed_test.PROFILING_SUPPORTED_BACKENDS.append(backend)
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(backend)
    return distributed_test


def tests_of(suite: ModuleType) -> type[Any]:
    """The test case as PyTorch puts it together in its test_distributed_spawn.py."""
    base = suite.DistributedTest._DistTestBase

    def accumulate(case: Any, *arguments: Any, **named: Any) -> None:
        """This one asks for gloo by its name while it runs, to choose CPUs."""
        with mock.patch.object(suite, "BACKEND", REFERENCE):
            base._test_accumulate_gradients_no_sync(case, *arguments, **named)

    return type("Conformance", (suite.TestDistBackend, base), {"_test_accumulate_gradients_no_sync": accumulate})


def forbid_gloo() -> None:
    """Makes every gloo group an error, so that no test passes by the reference instead of the backend."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415 - for unisono only

    class Forbidden(distributed_c10d.ProcessGroupGloo):
        """What distributed_c10d makes gloo groups of, made impossible."""

        def __init__(self, *_arguments: Any, **_options: Any) -> None:
            raise AssertionError("a gloo group was asked for while another backend is tested")

    distributed_c10d.ProcessGroupGloo = Forbidden


def prepare_folder(suite: ModuleType, folder: Path) -> None:
    """A test's folder of its own: the suite meets there, writes there and rendezvous there."""
    for part in ("barrier", "test_dir", "init_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)  # each rank makes them, the first wins
    os.environ["TEMP_DIR"] = str(folder)
    suite.INIT_METHOD = os.environ["INIT_METHOD"] = f"file://{folder}/init_dir/shared_init_file"
    suite.Barrier.barrier_id = 0


def run_body(suite: ModuleType, case: Any, name: str, backend: str) -> None:
    """A test between making the default group and destroying it, as TestDistBackend._run does it."""
    seconds = suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)
    dist.init_process_group(
        init_method=case.init_method,
        backend=backend,
        world_size=int(case.world_size),
        rank=case.rank,
        timeout=timedelta(seconds=seconds),
    )
    if dist.get_backend() != backend:
        raise AssertionError(f"the default group is of {dist.get_backend()}, not of {backend}")
    case._barrier()
    torch.testing._internal.common_utils.set_rng_seed()
    getattr(case, name)()
    case._barrier()


def run_test(suite: ModuleType, case: Any, name: str, backend: str) -> Outcome:
    """Run one test on this rank and say what came of it; what ends badly is left as it is, for fresh ranks follow."""
    reasons = {skip.exit_code: skip.message for skip in suite.TEST_SKIPS.values()}
    outcome = attempt(lambda: run_body(suite, case, name, backend), reasons)
    if outcome.clean and dist.is_initialized():
        end = attempt(dist.destroy_process_group, reasons)
        return outcome if end.clean else end
    return outcome


def one_test(suite: ModuleType, name: str, rank: int, backend: str, folder: Path) -> Outcome:
    """A test in an environment that it may change: variables and the debug level are put back after it."""
    cases = tests_of(suite)
    skipped = getattr(getattr(cases, name), "__unittest_skip_why__", "")
    if skipped and not skipped.startswith(KEPT_FOR_MPI):
        return Outcome(SKIPPED, skipped)
    before = dict(os.environ)
    try:
        prepare_folder(suite, folder)
        case = cases(name)
        case.rank, case.file_name = rank, str(folder / "rendezvous")
        return run_test(suite, case, name, backend)
    finally:
        os.environ.clear()
        os.environ.update(before)
        dist.set_debug_level_from_env()


def main(backend: str, port: int) -> None:
    """Run the tests that the store names, telling it every outcome, until one of them fails on any rank."""
    rank = int(next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))
    faulthandler.register(signal.SIGUSR1)  # run.py asks so where a rank hangs
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(hours=1))
    plan = json.loads(store.get("plan"))
    suite = load(backend, plan["ranks"], plan["profiling"])
    if backend != REFERENCE:
        import unisono  # noqa: F401, PLC0415 - registers the backend

        forbid_gloo()
    store.set(f"process/{rank}", str(os.getpid()))
    for number, name in enumerate(plan["tests"]):
        outcome = one_test(suite, name, rank, backend, Path(plan["folder"]) / str(number))
        store.set(f"outcome/{number}/{rank}", json.dumps(outcome))
        everyone = [Outcome(*json.loads(store.get(f"outcome/{number}/{peer}"))) for peer in range(plan["ranks"])]
        if not all(peer.clean for peer in everyone):
            return  # the groups of this process may be broken: the next test has fresh ones


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
