"""Checkpoints on the disk: written into a temporary folder, synced and renamed; read to the end, with their checksums.

States are named tensors and JSON: nothing is pickled, and memory that two names share is stored once.

{"encode.weight": W, "decode.weight": W, "head._extra_state": {"version": (3, 1)}}

tensors    {"encode.weight": W}
outline    {"dict": [["encode.weight", {"tensor": "encode.weight"}],
                     ["decode.weight", {"tensor": "encode.weight"}],
                     ["head._extra_state", {"dict": [["version", {"tuple": [3, 1]}]]}]],
            "metadata": {"dict": [["", {"dict": [["version", 1]]}], ...]}}     of a model: the versions of its modules
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_bytes

from unisono.errors import CheckpointError
from unisono.files import naming_os_errors, sync
from unisono.training.checkpoint import layout
from unisono.training.checkpoint.layout import Checkpoint, DamagedCheckpointError, checkpoint_name, checkpoint_names


def load_newest(folder: Path, names: Sequence[str] | None = None) -> tuple[Checkpoint, list[DamagedCheckpointError]]:
    """Return the newest complete checkpoint in `folder`, and the newer, damaged ones. The disk is not changed.

    `names` are those to try, in order; None: all. Raises CheckpointError when none is complete, or one that was tried
    before cannot be read or was written by a newer release.
    """
    checkpoint, damaged = load_first(folder, checkpoint_names(folder)[::-1] if names is None else names)
    if checkpoint is not None:
        return checkpoint, damaged
    if damaged:
        raise CheckpointError(
            f"no checkpoint in {folder} is complete: {'; '.join(map(str, damaged))}; nothing was changed"
        )
    raise CheckpointError(f"there is no checkpoint in {folder}")


def load_first(folder: Path, names: Sequence[str]) -> tuple[Checkpoint | None, list[DamagedCheckpointError]]:
    """Return the first of `names` in `folder` that is complete, if one is, and the damaged ones before it. Raises
    CheckpointError where one that was tried cannot be read or was written by a newer release."""
    damaged = list[DamagedCheckpointError]()
    for name in names:
        try:
            return _load(folder / name), damaged
        except DamagedCheckpointError as error:
            damaged.append(error)
    return None, damaged


def _load(path: Path) -> Checkpoint:
    """Read a checkpoint to its end. Raises DamagedCheckpointError, and CheckpointError where it cannot be read."""
    manifest = layout.read_manifest(path)
    with layout.reading(path, SafetensorError):
        weights, optimizer = (load_file(path / f"{name}.safetensors") for name in layout.TENSORS)
    if manifest["format"] > 1:
        return _joined(manifest, weights, optimizer)
    states = weights, _optimizer_of_format_1(optimizer, manifest["optimizer"])
    return Checkpoint(manifest["step"], *states, manifest["progress"])


def _joined(manifest: dict[str, Any], *tensors: dict[str, torch.Tensor]) -> Checkpoint:
    """Return the checkpoint that `_parted` has parted."""
    states = {name: unflatten_state(manifest[name], own) for name, own in zip(layout.TENSORS, tensors, strict=True)}
    return Checkpoint(step=manifest["step"], progress=manifest["progress"], **states)


def _parted(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[dict[str, torch.Tensor]]]:
    """Return what is JSON in a checkpoint, and the tensors of each of its states."""
    states = [flatten_state(getattr(checkpoint, name), f"the run's {name}") for name in layout.TENSORS]
    outlines = zip(layout.TENSORS, (outline for _, outline in states), strict=True)
    manifest = {"step": checkpoint.step, "progress": checkpoint.progress, **dict(outlines)}
    return manifest, [_without_shared_memory(tensors) for tensors, _ in states]


def encode(checkpoint: Checkpoint) -> list[bytes]:
    """Return a checkpoint as a message: JSON, and what its files of tensors hold."""
    manifest, states = _parted(checkpoint)
    return [json.dumps(manifest).encode(), *map(to_bytes, states)]


def decode(message: Sequence[bytes]) -> Checkpoint:
    """Return the checkpoint that `encode` has made a message of."""
    return _joined(json.loads(message[0]), *map(from_bytes, message[1:]))


def _optimizer_of_format_1(tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {int(parameter): dict(entries) for parameter, entries in rest["values"].items()}
    for name, tensor in tensors.items():
        parameter, key = name.split(".", 1)
        state.setdefault(int(parameter), {})[key] = tensor
    return {"state": state, "param_groups": rest["param_groups"]}


def save(folder: Path, checkpoint: Checkpoint, kept: int = layout.CHECKPOINTS_KEPT) -> Path:
    """Write a checkpoint into `folder`, where other processes may write others, and remove older ones beyond the newest
    `kept`. Return its path. Raises CheckpointError when the disk refuses; earlier checkpoints are still there."""
    target = folder / checkpoint_name(checkpoint.step)
    aside, replaced = folder / f".{target.name}.tmp", folder / f"{target.name}{layout.REPLACED_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove(aside)  # of a process that was killed
        _write(aside, checkpoint)
        if os.path.lexists(target):  # an epoch's last step, which has its metrics now
            _remove(replaced)
            target.rename(replaced)
        aside.rename(target)
        sync(folder)
        _remove(replaced)
        for old in [name for name in checkpoint_names(folder) if name < target.name][: 1 - kept]:
            surplus = folder / f".{old}.surplus.tmp"
            with suppress(FileNotFoundError):  # another process removes it at the same time; none is ever seen in part
                (folder / old).rename(surplus)
                _remove(surplus)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint of step {checkpoint.step} into {folder}: {error}; older ones are "
            "unchanged: free space or repair the disk, then resume with --resume"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the files of a checkpoint into a new folder, whole on the disk."""
    plain, states = _parted(checkpoint)
    folder.mkdir()
    files = {}
    for name, tensors in zip(layout.TENSORS, states, strict=True):
        path = folder / f"{name}.safetensors"
        save_file(tensors, path)
        sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": layout.digest(path)}
    manifest = {"format": layout.FORMAT, **plain, "files": files}
    content = json.dumps({**manifest, "sha256": layout.manifest_digest(manifest)}, indent=1) + "\n"
    (folder / layout.MANIFEST).write_text(content)
    sync(folder / layout.MANIFEST)
    sync(folder)


def remove_newer(folder: Path, step: int) -> list[str]:
    """Remove checkpoints newer than that of `step`, and what a killed run has left half written. Return their names.
    The run's folder is locked: no other process writes. Raises CheckpointError where the disk refuses."""
    failure = f"cannot remove what is newer than the checkpoint of step {step} in {folder}"
    with naming_os_errors(failure, CheckpointError, "; remove it, then resume again"):
        for left in folder.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        for left in folder.glob(f"step-*{layout.REPLACED_SUFFIX}"):
            place = left.with_name(left.name.removesuffix(layout.REPLACED_SUFFIX))
            if os.path.lexists(place):
                _remove(left)
            else:
                left.rename(place)
        newer = [name for name in checkpoint_names(folder) if layout.step_of(name) > step]
        for name in newer:
            _remove(folder / name)
    return newer


def discard_newer(folder: Path, step: int, damaged: Sequence[DamagedCheckpointError]) -> list[str]:
    """Remove what is newer than the checkpoint of `step`, or half written, and rename damaged ones. Return lines to
    log. Raises CheckpointError where the disk refuses."""
    notes = []
    with naming_os_errors(
        f"cannot rename a damaged checkpoint in {folder}", CheckpointError, "; rename it, then resume again"
    ):
        for damage in damaged:
            new, count = f"{damage.name}{layout.DAMAGED_SUFFIX}", 1
            while os.path.lexists(folder / new):
                count += 1
                new = f"{damage.name}{layout.DAMAGED_SUFFIX}-{count}"
            (folder / damage.name).rename(folder / new)
            notes.append(f"{damage}; it is now {new}, and the previous one is used")
    if removed := remove_newer(folder, step):
        lacking = f"not all workers had left a snapshot for {', '.join(removed)}"
        notes.append(f"{lacking}: removed, and an earlier checkpoint is used")
    return notes


def _without_shared_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors on the host, of which no two share memory; those that overlap others are copied."""
    seen, apart = set[int](), {}
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        memory = plain.untyped_storage().data_ptr()
        apart[name] = (plain.clone() if memory in seen else plain).cpu()
        seen.add(memory)
    return apart


def _remove(path: Path) -> None:
    """Remove a checkpoint; of a link only the link, since others may use its target."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


# States as tensors and JSON ------------------------------------------------------------------------------------------

Outline = Any
"""JSON: None, bool, int, float and str stand for themselves; other values are objects with one key, their kind."""

SCALARS = (type(None), bool, int, float, str)
CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "tuple", dict: "dict", OrderedDict: "dict"}
"""Exact types only: a subclass would not be restored as itself."""


def flatten_state(state: object, what: str) -> tuple[dict[str, torch.Tensor], Outline]:
    """Return the tensors of a nested value, by name, and the outline that `unflatten_state` needs with them. Raises
    CheckpointError for a value that fits neither, naming `what` and the path to the value."""
    tensors: dict[str, torch.Tensor] = {}
    names: dict[tuple[object, ...], str] = {}  # by memory

    def name_of(tensor: torch.Tensor, path: tuple[object, ...]) -> str:
        """Return the name under which the tensor's memory is stored: a new one where it is not stored yet."""
        if torch.nn.parameter.is_lazy(tensor):
            raise _unsupported(what, path, "has no size before the model is called once")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or not _serializable(tensor.dtype):
            raise _unsupported(what, path, f"is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}")
        place = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        memory = *place, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
        if tensor.numel() and memory in names:
            return names[memory]
        name = plain = ".".join(map(str, path))
        count = 1
        while name in tensors:  # "a.b", and b of a
            count += 1
            name = f"{plain}#{count}"
        tensors[name], names[memory] = tensor, name
        return name

    def outline(value: object, path: tuple[object, ...]) -> Outline:
        if isinstance(value, torch.Tensor):
            return {"tensor": name_of(value, path)}
        if type(value) in SCALARS:
            return value
        kind = CONTAINERS.get(type(value), "")
        if isinstance(value, dict) and kind:
            for key in value:
                if type(key) not in SCALARS:
                    raise _unsupported(what, (*path, key), f"has a key of type {type(key).__name__}")
            outlined = {"dict": [[key, outline(part, (*path, key))] for key, part in value.items()]}
            versions = getattr(value, "_metadata", None)
            return outlined if versions is None else {**outlined, "metadata": outline(versions, (*path, "_metadata"))}
        if isinstance(value, list | tuple) and kind:
            return {kind: [outline(part, (*path, index)) for index, part in enumerate(value)]}
        raise _unsupported(what, path, f"is of type {type(value).__module__}.{type(value).__qualname__}")

    return tensors, outline(state, ())


def unflatten_state(outline: Outline, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the value that `flatten_state` split into `tensors` and `outline`."""
    if not isinstance(outline, dict):
        return outline
    kind, content = next(iter(outline.items()))
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        restored = {key: unflatten_state(part, tensors) for key, part in content}
        versions = outline.get("metadata")
        return restored if versions is None else _with_versions(restored, unflatten_state(versions, tensors))
    parts = [unflatten_state(part, tensors) for part in content]
    return parts if kind == "list" else tuple(parts)


def _with_versions(entries: dict[str, Any], versions: Any) -> dict[str, Any]:
    """Return a model's state_dict with the versions of its modules, which PyTorch keeps in an attribute."""
    state = OrderedDict(entries)
    state._metadata = versions  # type: ignore[attr-defined]
    return state


def load_weights(model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Load a checkpoint's weights into a model. Checkpoints of older releases have no versions of modules: they are
    taken to be the model's."""
    if not hasattr(weights, "_metadata"):
        weights = _with_versions(weights, getattr(model.state_dict(), "_metadata", None))
    model.load_state_dict(weights)


def copied(value: Any, to: str | None = None) -> Any:
    """Return a state with copies of its tensors, on a device if one is named; what is there already is not copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if to is None else value.detach().to(to)
    if isinstance(value, dict):
        state = copy(value)  # with the versions of a model's modules
        state.update((key, copied(part, to)) for key, part in value.items())
        return state
    kind = type(value)
    return kind(copied(part, to) for part in value) if kind in (list, tuple) else value


def check_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise CheckpointError, naming the entry, where a checkpoint cannot hold the model's or the optimizer's state."""
    base = torch.nn.Module
    for name, module in model.named_modules():
        kept = type(module).get_extra_state is not base.get_extra_state
        if kept and type(module).set_extra_state is base.set_extra_state:
            raise CheckpointError(
                f"the model cannot be checkpointed: {type(module).__name__} ({name or 'the model itself'}) has "
                "get_extra_state, but no set_extra_state, so that no run could resume from it"
            )
    flatten_state(model.state_dict(), "the model")
    flatten_state(optimizer.state_dict(), "the optimizer")


@lru_cache
def _serializable(dtype: torch.dtype) -> bool:
    try:
        to_bytes({"none": torch.empty(0, dtype=dtype)})
    except (SafetensorError, KeyError, ValueError, RuntimeError):
        return False
    return True


def _unsupported(what: str, path: tuple[object, ...], why: str) -> CheckpointError:
    place = repr(path[0]) + "".join(f"[{key!r}]" for key in path[1:]) if path else "its state"
    return CheckpointError(
        f"{what} cannot be checkpointed: {place} {why}; a checkpoint holds dense tensors, None, bool, int, float, str, "
        "and lists, tuples and dicts of them"
    )
