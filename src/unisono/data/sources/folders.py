"""Folders with one subfolder for each class, or audio files side by side whose names begin with their class.

    data/train/cat/1.jpg      data/cat/1.jpg      data/3_anna_0.wav
    data/test/dog/2.jpg       data/dog/2.jpg      data/7_paul_4.wav

Hidden files, and files beside the folders of classes, are ignored.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unisono.data.kinds import find_kind
from unisono.data.sources import Source, Splits, kind_of, labelled_source, split_of, walk
from unisono.errors import PackError


def find(path: Path) -> Splits | None:
    """Return the splits of a folder, or all of it if its subfolders are classes; None if no file in it is known."""
    if not path.is_dir():
        return None
    folders = {folder.name: folder for folder in sorted(path.iterdir()) if folder.is_dir()}
    splits = {split: folder for name, folder in folders.items() if (split := split_of([name]))}
    others = [folder for folder in folders.values() if splits and folder not in splits.values()]
    other = next((folder.name for folder in others if _files(folder)[0]), None)
    if other is not None:
        raise PackError(
            f"{path} has {next(iter(splits.values())).name}, which is a split of a data set, beside {other}, which is "
            "not; pack the splits one by one, or give the class another name"
        )
    found = {name: source for name, folder in (splits or {"": path}).items() if (source := _source(folder)) is not None}
    return found or None


def _source(path: Path) -> Source | None:
    there, others = _files(path)
    files = [file for file in there if file.is_file()]
    if not files:
        return None
    inside = [file for file in files if file.parent != path]
    files = inside or files
    labels = [file.relative_to(path).parts[0] if inside else file.stem.split("_")[0] for file in files]
    keys, sizes = [str(file.relative_to(path)) for file in files], [file.stat().st_size for file in files]
    found = labelled_source(keys, labels, sizes, lambda number: files[number].read_bytes(), path, files)
    if not inside and not find_kind(found.kind).class_in_name:
        return None
    skipped = [
        (str(file.relative_to(path)), "it is no file, or a link to none") for file in there if not file.is_file()
    ]
    folders = [folder.name for folder in sorted(path.iterdir()) if folder.is_dir() and folder.name not in found.classes]
    empty = [name for name in folders if inside and not name.startswith(".")]
    beside = [str(file.relative_to(path)) for file in others if (file.parent != path) == bool(inside)]
    return replace(found, skipped=skipped, empty=empty, others=beside)


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of known kinds in a folder, of which some may be links to none, and those of others."""
    known: tuple[list[Path], list[Path]] = [], []
    for file in sorted(walk(path)):
        known[kind_of(file.name) is None].append(file)
    return known
