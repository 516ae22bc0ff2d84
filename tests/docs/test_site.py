"""Site: built strictly, so that a broken link, an unknown reference or a page outside the navigation fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from unisono.schedules import SCHEDULES
from unisono.step.overlaps import OVERLAPS

ROOT = Path(__file__).parents[2]


def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    commands = (tmp_path / "site" / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "--resume" in commands
    for name in SCHEDULES:
        assert (tmp_path / "site" / "pictures" / f"{name}.svg").read_text() == (
            ROOT / "docs" / "pictures" / f"{name}.svg"
        ).read_text()
    for name in OVERLAPS:
        assert (tmp_path / "site" / "pictures" / f"step-{name}.svg").read_text() == (
            ROOT / "docs" / "pictures" / f"step-{name}.svg"
        ).read_text()


def test_links_lead_to_files_in_the_repository_too() -> None:
    dead = []
    for page in (ROOT / "docs").rglob("*.md"):
        prose = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        targets = re.findall(r"\]\(([^)#\s]+)", prose)
        dead += [
            f"{page.name}: {target}"
            for target in targets
            if "://" not in target and not (page.parent / target).exists()
        ]
    assert not dead
