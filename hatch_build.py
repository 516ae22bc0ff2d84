"""Build hook: compiles the C files of `src/unisono/transports` where there is a compiler; else Python plays all steps.

python hatch_build.py    compiles it in place
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a program
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).parent
FOLDER = ROOT / "src" / "unisono" / "transports"
MODULE = FOLDER / f"_steps{sysconfig.get_config_var('EXT_SUFFIX')}"
"""The module for this Python."""


def compile_steps() -> str:
    """Compile the player of steps, and return an empty text; else the reason why it was not compiled."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    include = sysconfig.get_paths()["include"]
    sources = map(str, sorted(FOLDER.glob("*.c")))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]")))).hexdigest()
    options = ["-O3", "-fno-math-errno", "-shared", "-fPIC", f"-I{include}", f'-DSOURCES="{digest}"']
    partial = MODULE.with_suffix(".partial")
    command = [*compiler, *options, *sources, "-o", str(partial)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        reason = f"there is no C compiler {compiler[0]!r}: {error.strerror}"
    except subprocess.CalledProcessError as error:
        reason = f"{shlex.join(command)}:\n{error.stderr}"
    else:
        partial.replace(MODULE)  # at once: others may import it meanwhile
        return ""
    MODULE.unlink(missing_ok=True)  # that of other sources would be refused at import
    return reason


class CompiledSteps(BuildHookInterface):  # type: ignore[type-arg,unused-ignore]
    """Adds the compiled player to a wheel, which is then one of this platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - Hatchling passes it
        if reason := compile_steps():
            self.app.display_warning(f"short collectives of one node will be played by Python: {reason}")
            return
        build_data["pure_python"], build_data["infer_tag"] = False, True
        build_data["artifacts"].append(str(MODULE.relative_to(ROOT)))


if __name__ == "__main__":
    sys.exit(compile_steps() or None)
