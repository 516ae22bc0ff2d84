"""Commands of the pages: each is run, by `make docs-check` (`docs/commands.py`) or by the test that it names."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(unisono|mpiexec|srun|sbatch|make|pip|python)\b(?!:)", re.MULTILINE)


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_commands", ROOT / "docs" / "commands.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_commands"] = module
    spec.loader.exec_module(module)
    return module


commands = load()


@pytest.mark.parametrize("page", commands.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_run_somewhere(page: Path) -> None:
    for language, title, body, _ in commands.FENCE.findall(page.read_text(encoding="utf-8")):
        lines = [line.removeprefix("$ ") for line in body.splitlines() if COMMAND.match(line)]
        if language == "console":
            assert lines, body
            assert all(line.startswith(tuple(commands.ELSEWHERE)) for line in lines), lines
        elif language != "sh" and not title:
            assert not lines, f"a fence of {page.name} without a language has commands: {lines}"


def test_what_runs_them_elsewhere_exists() -> None:
    for file, text in commands.ELSEWHERE.values():
        assert text in (ROOT / file).read_text(encoding="utf-8"), file


def test_a_page_becomes_programs_and_scripts(tmp_path: Path) -> None:
    text = (
        '```python title="one.py"\nprint(1)\n```\n```sh\npython one.py > out\ntest -s out\n```\n```\nno command\n```\n'
    )
    assert [type(step).__name__ for step in commands.steps_of(text)] == ["Program", "Command"]
    page = ROOT / "docs" / "nothing.md"
    folder = tmp_path / "page"
    folder.mkdir()
    assert list(commands.steps_of(text)) == [
        commands.Program("one.py", "print(1)\n"),
        commands.Command("python one.py > out\ntest -s out\n"),
    ]
    assert page not in commands.pages()


def test_a_command_that_fails_ends_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\ntrue\nfalse\n```\n", encoding="utf-8")
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit, match="exit code 1"):
        commands.run(page, tmp_path / "folder")


@pytest.mark.parametrize(("prints", "error"), [("one, two", ""), ("two, one", "the output has not two, one")])
def test_what_a_page_says_that_a_command_prints_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints: str, error: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```sh\necho one\necho two >&2\n```\n<!-- prints: {prints} -->\n", encoding="utf-8")
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    (tmp_path / "folder").mkdir()
    if not error:
        assert commands.run(page, tmp_path / "folder") == 1
        return
    with pytest.raises(SystemExit, match=error):
        commands.run(page, tmp_path / "folder")
