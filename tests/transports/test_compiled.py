"""Compiled code is that of the sources beside it, or says so."""

from __future__ import annotations

import runpy
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.transports.compiled import FOLDER, check_digest, compiled, digest_of


@pytest.mark.skipif(compiled is None, reason="this installation has no compiled code")
def test_changed_sources_are_refused_with_the_remedy(tmp_path: Path) -> None:
    for source in FOLDER.glob("*.[ch]"):
        shutil.copy(source, tmp_path)
    check_digest(compiled.SOURCES, digest_of(tmp_path))
    with (tmp_path / "_steps.h").open("a") as header:
        header.write("\n")
    with pytest.raises(UsageError, match=r"hatch_build\.py"):
        check_digest(compiled.SOURCES, digest_of(tmp_path))


@pytest.mark.parametrize("compiler", ["no such compiler", "false"])
def test_without_a_compiler_no_code_of_other_sources_stays(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = runpy.run_path(str(Path(__file__).parents[2] / "hatch_build.py"))["compile_steps"]
    monkeypatch.setitem(build.__globals__, "MODULE", tmp_path / "_steps.so")
    (tmp_path / "_steps.so").touch()
    monkeypatch.setenv("CC", compiler)
    assert build()
    assert list(tmp_path.iterdir()) == []


def test_compiled_code_without_its_sources_is_taken(tmp_path: Path) -> None:
    assert digest_of(tmp_path) == ""
    check_digest("that of an installed wheel", digest_of(tmp_path))


@pytest.mark.skipif(compiled is None, reason="this installation has no compiled code")
def test_a_word_is_polled_until_it_differs() -> None:
    row = memoryview(bytearray(24)).cast("q")
    row[1] = 5
    compiled.poll_word(row, 1, 5, 10)  # ends by the number of polls
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(compiled.poll_word, row, 1, 5, 1 << 60)
        row[1] = 6
        waits.result()
