"""Pages of the site that are not written here: README and its companions, diagrams, and the reference of commands.

    docs/*.md  ─────────────────────────────┐
    README.md, CONTRIBUTING.md, ... ────────┼─▶ site      links to a page of the site are rewritten to it;
    unisono draw ... ─▶ pictures/*.svg ─────┤             a link to another file of the repository becomes its path
    unisono --help ... ─▶ commands.md ──────┘

MkDocs calls the functions whose names begin with `on_` (`mkdocs.yml`, hooks).
"""

from __future__ import annotations

import os
import posixpath
import re
import tempfile
from itertools import zip_longest
from pathlib import Path

import click
import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from unisono.cli import app
from unisono.cli.draw import draw
from unisono.schedules import SCHEDULES
from unisono.step.overlaps import OVERLAPS

ROOT = Path(__file__).parents[1]

COMPANIONS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "SECURITY.md",
}
"""Pages of the repository's root, by their names on the site."""

PLACES = {"hierarchical": {"nodes": 4}, "leader": {"nodes": 4}, "supernodes": {"supernodes": 2}}
"""Nodes and supernodes of 8 ranks in the diagrams of schedules that go by them."""

REFERENCES = {
    "recipe": "Recipe keys",
    "python": "Python",
    "horovod": "Horovod's functions",
    "schedules": "Schedules and networks",
    "steps": "Steps and rules",
}


def diagrams(folder: Path) -> None:
    """Draw each schedule and each overlap of a step into `folder`, as SVG."""
    for name in SCHEDULES:
        draw(name, ranks=8, **PLACES.get(name, {}), svg=folder / f"{name}.svg")
    for name in OVERLAPS:
        draw("step", overlap=name, nodes=2, svg=folder / f"step-{name}.svg")


def commands() -> str:
    """Return the page of commands: usage, arguments and options of each, as `--help` has them."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    lines = ["# Command line", "", "`unisono COMMAND --help` prints the same.", ""]
    for name, command in sorted(group.commands.items()):
        lines += _command(f"unisono {name}", command)
    return "\n".join(lines)


def _command(name: str, command: click.Command) -> list[str]:
    if hasattr(command, "commands"):
        parts = [_command(f"{name} {part}", below) for part, below in sorted(command.commands.items())]
        return [line for part in parts for line in part]
    lines = [f"## {name}", "", (command.help or "").replace("\b\n", ""), "", "| option | meaning |", "| --- | --- |"]
    for parameter in command.params:
        argument = parameter.param_type_name == "argument"
        names = (parameter.metavar or parameter.name).upper() if argument else ", ".join(parameter.opts)
        default = (
            ""
            if parameter.default is None or parameter.default is False or parameter.default in ((), []) or argument
            else f" [{parameter.default}]"
        )
        text = (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
        lines.append(f"| `{names}` | {text}{default} |")
    return [*lines, ""]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and diagrams that are made."""
    made = {site: (ROOT / source).read_text(encoding="utf-8") for source, site in COMPANIONS.items()}
    made["reference/commands.md"] = commands()
    with tempfile.TemporaryDirectory() as folder:
        diagrams(Path(folder))
        made |= {f"pictures/{path.name}": path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}
    for path, content in made.items():
        if (replaced := files.get_file_from_path(path)) is not None:
            files.remove(replaced)
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository to links between pages of the site."""
    source = {site: name for name, site in COMPANIONS.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewrite(match: re.Match[str]) -> str:
        text, target = match.group(1), match.group(2)
        path, hash_, section = target.partition("#")
        if not path or "://" in path:
            return match.group(0)
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        site = COMPANIONS.get(place, place.removeprefix("docs/"))
        if place not in COMPANIONS and not place.startswith("docs/"):
            if not (ROOT / place).exists():
                raise FileNotFoundError(f"{source} links to {target}, and there is no {place}")
            return text if text.startswith("`") else f"{text} (`{place}`)"
        text = text.removeprefix("docs/").removesuffix(".md")
        return f"[{text}]({os.path.relpath(site, posixpath.dirname(page.file.src_uri) or '.')}{hash_}{section})"

    parts = re.split(r"(^ *```.*?^ *```$)", _pictures_of(markdown, source), flags=re.MULTILINE | re.DOTALL)
    prose = (re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", rewrite, part) for part in parts[::2])
    return "".join(text for pair in zip_longest(prose, parts[1::2], fillvalue="") for text in pair)


def _pictures_of(markdown: str, source: str) -> str:
    """Point pictures of README at those of the site."""
    return markdown.replace("](docs/pictures/", "](pictures/") if source == "README.md" else markdown
