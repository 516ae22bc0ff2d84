"""Runs the tests in tests/mpi on real ranks, for as long as they make progress: rank 0 prints a dot a test.

On 1, 2, 3 and 4 ranks what depends on their number: who exchanges what with whom. What stands on that is run on 1 rank,
and on as few as show it: 3 are more than a machine of 2 cores has, and take several times as long as 2. What makes
groups of 1 to all ranks is run on 1 and on 3, which has the others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from tests.progress import SILENCE_SECONDS, run

from unisono.launch import find_mpiexec, launch_environment

ROOT = Path(__file__).parents[1]
MPI_TESTS = ROOT / "tests" / "mpi"

LEFT_OUT: dict[int, tuple[str, ...]] = {
    1: (),
    2: (
        "collectives/test_direct.py",
        "collectives/test_ops.py",
        "collectives/test_watch.py",
        "data/test_dimd.py",
        "data/test_feed.py",
        "data/test_order.py",
        "data/test_shuffle.py",
        "data/test_storage.py",
        "loops/test_loops.py",
        "reducer/test_bits.py",
        "reducer/test_phases.py",
        "reducer/test_rules.py",
        "reducer/test_sharded.py::test_losses_are_those_of_bsp",
        "reducer/test_sharded.py::test_all_overlaps_on_one_node_and_on_two",
        "reducer/test_sharded.py::test_a_wire_rounds_gradients",
        "reducer/test_sharded.py::test_each_rank_has_its_share_of_the_state",
        "reducer/test_sharded.py::test_other_layouts_and_dtypes",
        "reducer/test_virtual_ranks.py::test_any_number_of_ranks_has_the_bits_of_one",
        "reducer/test_virtual_ranks.py::test_norms_of_shards_have_the_bits_of_any_number_of_ranks",
        "reducer/test_virtual_ranks.py::test_settings_change_no_bit",
        "reducer/test_virtual_ranks.py::test_without_virtual_ranks_no_setting_changes_a_bit",
        "rules/test_outer_steps.py::test_ranks_train_what_one_process_plays",
        "rules/test_outer_steps.py::test_one_node_and_several_have_the_same_bits",
        "rules/test_outer_steps.py::test_another_number_of_ranks_begins_with_the_anchor",
        "step/test_store.py",
        "tensor_parallel/test_layouts.py",
        "tensor_parallel/test_layers.py",
        "tensor_parallel/test_losses.py",
        "tensor_parallel/test_runs.py::test_checkpoints_are_the_same_whatever_the_split",
        "tensor_parallel/test_runs.py::test_dropouts_follow_from_seed_step_sample_and_layer",
        "tensor_parallel/test_runs.py::test_split_runs_follow_the_path_of_whole_ones_and_resume_with_other_splits",
        "torch_backend/test_process_group.py::test_a_timeout_names_the_missing_ranks",
        "training/test_audit.py::test_any_number_of_ranks_has_the_same_hashes",
        "training/test_foresight.py::test_runs_that_a_machine_file_does_not_predict_say_so",
        "training/test_run.py",
        "training/test_timeline.py",
        "training/test_trainer.py::test_the_same_loss_as_serial_for_100_steps",
        "training/test_worker.py",
    ),
    3: (
        "collectives/test_schedules.py::test_extra_memory_is_that_of_the_pieces_in_flight",
        "collectives/test_staged.py",
        "collectives/test_waits.py",
        "data/test_batch_dataset.py",
        "data/test_choose.py",
        "data/test_loader.py",
        "horovod",
        "loops/test_split_layers.py",
        "measure",
        "reducer/test_buffers.py",
        "reducer/test_devices.py",
        "reducer/test_failed_passes.py",
        "reducer/test_life.py",
        "reducer/test_models.py",
        "reducer/test_sharded.py::test_a_copy_of_the_optimizer_has_the_whole_state",
        "reducer/test_sharded.py::test_a_layer_is_unfrozen_and_the_model_made_parallel_again",
        "reducer/test_sharded.py::test_a_loop_of_ones_own",
        "reducer/test_sharded.py::test_a_parameter_of_no_parallel_model_is_not_updated",
        "reducer/test_sharded.py::test_a_placeholder_is_of_its_pass_and_parameter",
        "reducer/test_sharded.py::test_a_rank_without_a_batch_has_no_gradients_in_its_zeros",
        "reducer/test_sharded.py::test_a_step_with_a_closure",
        "reducer/test_sharded.py::test_gradients_in_shards_cannot_be_read",
        "reducer/test_sharded.py::test_optimizers_of_pytorch",
        "reducer/test_step.py",
        "reducer/test_weight_first.py",
        "rules/test_outer_steps.py::test_a_run_resumes_bit_for_bit_wherever_it_stopped",
        "rules/test_outer_steps.py::test_an_evaluation_uses_the_anchor",
        "rules/test_outer_steps.py::test_an_exchange_runs_beside_the_next_steps",
        "rules/test_outer_steps.py::test_averaged_gradients_in_a_block_scaled_wire",
        "rules/test_outer_steps.py::test_the_rule_in_a_custom_loop",
        "tensor_parallel/test_choose_plan.py",
        "tensor_parallel/test_layers.py::test_a_trainer_with_any_overlap_and_clipping",
        "tensor_parallel/test_layers.py::test_training_continues_with_another_plan_on_other_ranks",
        "tensor_parallel/test_losses.py::test_sharded_updates_of_split_layers",
        "tensor_parallel/test_losses.py::test_split_networks_have_the_losses_of_whole_ones",
        "tensor_parallel/test_runs.py",
        "torch_backend/test_buckets.py",
        "torch_backend/test_forms.py",
        "torch_backend/test_process_group.py::test_the_profiler_sees_operations_with_their_shapes",
        "training/scoring",
        "training/test_audit.py::test_a_step_of_a_run_is_recomputed",
        "training/test_audit.py::test_nothing_is_the_same_that_was_not_recomputed",
        "training/test_devices.py",
        "training/test_foresight.py::test_a_ledger_that_cannot_be_written_at_the_end_is_a_line",
        "training/test_foresight.py::test_a_machine_file_predicts_before_the_first_step",
        "training/test_foresight.py::test_a_model_that_cannot_be_predicted_runs_without_a_seal",
        "training/test_foresight.py::test_a_resumed_run_adds_a_seal_and_keeps_the_first",
        "training/test_foresight.py::test_a_rule_with_a_period_is_measured_by_periods",
        "training/test_foresight.py::test_a_run_that_is_not_predicted_says_so",
        "training/test_foresight.py::test_a_seal_changes_no_weights",
        "training/test_foresight.py::test_a_search_predicts_once_it_has_ended",
        "training/test_text.py",
        "training/test_trainer.py::test_every_optimizer_and_auxiliary_classifiers_follow_the_serial_run",
        "training/test_trainer.py::test_two_runs_end_with_identical_bits_on_all_ranks",
    ),
    4: (
        "collectives/test_direct.py",
        "collectives/test_ops.py",
        "collectives/test_ready.py",
        "collectives/test_schedules.py::test_extra_memory_is_that_of_the_pieces_in_flight",
        "collectives/test_staged.py",
        "collectives/test_trials.py",
        "collectives/test_waits.py",
        "collectives/test_watch.py",
        "data",
        "horovod",
        "loops/test_loops.py",
        "measure",
        "reducer",
        "rules",
        "step",
        "tensor_parallel/test_choose_plan.py::test_layers_of_a_device_are_timed_there_and_trained_as_on_the_host",
        "tensor_parallel/test_losses.py::test_batch_norm_beside_split_layers",
        "tensor_parallel/test_losses.py::test_uneven_and_empty_shares",
        "tensor_parallel/test_runs.py::test_a_rule_that_needs_whole_weights_splits_nothing",
        "tensor_parallel/test_runs.py::test_a_run_says_where_samples_are_gathered_and_scattered",
        "tensor_parallel/test_runs.py::test_a_run_with_layers_by_prediction_follows_the_path_of_whole_ones",
        "torch_backend",
        "training",
        "transports",
    ),
}
"""By the number of ranks, what is not run on so many: folders, files, and tests of a file.

2: what shows more where shares are uneven, sums have an order, and a node has ranks beside another node's; layers split
over 2 ranks, which 4 ranks have too, beside those split over all; virtual ranks, of which 3 ranks have a group of 2.
3: what sees itself and others, and shows with one other what it would with two; trainings of split layers that 4 ranks
make with groups of 2 and of 4. A group of 3 has uneven and empty shares.
4: whatever stands on collectives, and of split layers what a group of 2 or of 3 shows alone. Process groups of 4 have
programs of their own in tests/torch_backend.
"""


STDERR_TO_A_FILE = 'exec "$@" 2> "$0/$$.txt"'
"""Shell script that runs its arguments. A launcher that ends all ranks drops what it still holds of their errors."""


PYTEST = ("-m", "pytest", "-v", "-x", "--capture=sys", "-p", "no:cacheprovider", "--durations=20")
"""Arguments of each rank. pytest leaves descriptor 2 alone: what it would hold of it is lost when a thread, or the MPI
library, prints an error and ends the process in the middle of a test."""


def left_out(ranks: int) -> list[str]:
    """Arguments of pytest that leave out what is not run on so many ranks: tests by their names from the root on."""
    tests = MPI_TESTS.relative_to(ROOT)
    return [
        f"--deselect={tests / name}" if "::" in name else f"--ignore={MPI_TESTS / name}" for name in LEFT_OUT[ranks]
    ]


def run_pytest(ranks: int, folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run pytest on all ranks; return how it ended, and the errors of all ranks, whose files are in `folder`."""
    program = ["sh", "-c", STDERR_TO_A_FILE, str(folder), sys.executable, *PYTEST, *arguments]
    command = [str(find_mpiexec()), "-n", str(ranks), *program]
    done = run(command, SILENCE_SECONDS, None, launch_environment(os.environ, terminal=False))
    return done, "".join(f"{file.name}:\n{file.read_text()[-6000:]}\n" for file in sorted(folder.iterdir()))


@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.launches) for ranks in (2, 3, 4))])
def test_on_ranks(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, errors = run_pytest(ranks, tmp_path, str(MPI_TESTS), *left_out(ranks))
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{errors}"
    run_all_the_same = [name for name in LEFT_OUT[ranks] if re.search(rf"tests/mpi/{re.escape(name)}\b", done.stdout)]
    assert not run_all_the_same
    passed = [int(count) for count in re.findall(r"^=+ (\d+) passed", done.stdout, re.MULTILINE)]
    assert passed, done.stdout[-3000:]
    assert passed[0] > 50, "the tests were not collected"
    slowest = re.search(r"=+ slowest .*?(?=^=)", done.stdout, re.MULTILINE | re.DOTALL)
    assert slowest, done.stdout[-3000:]
    with capsys.disabled():
        print(f"\non {ranks} ranks: {slowest[0]}", file=sys.stderr)  # which pytest-xdist passes on


def test_last_words_in_the_middle_of_a_test_are_kept(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    file = tmp_path / "test_it.py"
    file.write_text("import os\ndef test_it():\n    os.write(2, b'last words')\n    os._exit(1)\n")
    done, errors = run_pytest(1, tmp_path / "errors", "--rootdir", str(tmp_path), str(file))
    assert done.returncode == 1
    assert "last words" in errors


def test_what_is_left_out_exists() -> None:
    for name in chain(*LEFT_OUT.values()):
        path, _, test = name.partition("::")
        assert (MPI_TESTS / path).exists(), name
        assert not test or f"\ndef {test}(" in (MPI_TESTS / path).read_text(), name


def test_every_test_is_run_on_one_rank_and_on_several() -> None:
    assert list(LEFT_OUT) == [1, 2, 3, 4]
    for file in MPI_TESTS.rglob("test_*.py"):
        for test in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE):
            path = str(file.relative_to(MPI_TESTS))
            left_out = {path, f"{path}::{test}", *map(str, Path(path).parents)}
            on = [ranks for ranks, names in LEFT_OUT.items() if not left_out & set(names)]
            assert 1 in on, f"{path}::{test}"
            assert len(on) > 1, f"{path}::{test}"
