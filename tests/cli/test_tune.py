from pathlib import Path

import pytest
from tests.progress import Run
from tests.usage_errors import assert_one_line_error

from unisono.network.choice import read_table


def test_a_table_is_written_and_used(unisono: Run, on_ranks: Run, tmp_path: Path) -> None:
    done = unisono("tune", "--ranks", "2", "--largest", "4", "--output", "table.toml")
    assert done.returncode == 0, done.stderr
    assert "wrote table.toml" in done.stdout
    assert read_table(tmp_path / "table.toml").rows["allreduce", "one node"]
    done = on_ranks("tune", "--largest", "4", UNISONO_TABLE="none.toml")
    assert_one_line_error(done, "none.toml: ")
    (tmp_path / "recipe.toml").write_text("[training]\nepochs = 3\n")
    for command in (["tune", "--largest", "4", "--output"], ["probe"]):
        done = on_ranks(*command, "recipe.toml")
        assert_one_line_error(done, "recipe.toml is no machine (it has no name")
        assert "name another file" in done.stderr
    assert (tmp_path / "recipe.toml").read_text() == "[training]\nepochs = 3\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--largest", "3"], "nothing to time below 4 bytes"),
        (["bench", "collectives", "--largest", "3"], "nothing to time below 4 bytes"),
        (["bench", "collectives", "--algorithms", "rong"], "there is no schedule 'rong'"),
        (["bench", "collectives", "--algorithms", "ring float8"], "there is no wire 'float8'"),
        (["bench", "collectives", "--rate", "fast"], "fast"),
    ],
)
def test_bad_input_starts_no_rank(in_process: Run, arguments: list[str], message: str) -> None:
    assert_one_line_error(in_process(*arguments), message)


def test_bad_input_gets_one_line(unisono: Run, on_ranks: Run) -> None:
    assert_one_line_error(on_ranks("tune", "--output", "nowhere/table.toml"), "cannot write nowhere/table.toml")
    assert_one_line_error(unisono("tune", "--ranks", "1"), "a single rank cannot communicate")


def test_bench(on_ranks: Run, tmp_path: Path) -> None:
    done = on_ranks("bench", "collectives", "--ranks", "2", "--largest", "4", "--algorithms", "ring")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {"results.json", "table.md", "plot.svg"}
