"""Errors that Unisono raises on purpose; the command line answers a UsageError with one line and exit code 2."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of `pyproject.toml`: Unisono is installed from its clone."""
    return f"pip install '.[{extra}]' in the clone of Unisono"


class UnisonoError(Exception):
    """Base class of all errors of Unisono."""


class UsageError(UnisonoError):
    """A request that cannot be carried out; the message names what to change."""


class RecipeError(UsageError):
    """A recipe, or a value set on the command line, that is not understood."""


class LaunchError(UsageError):
    """Ranks cannot be started as requested."""


class CheckpointError(UsageError):
    """A run cannot be saved, or not be resumed from the content of its directory."""


class TensorError(UsageError):
    """A tensor that the collectives cannot carry."""


class TableError(UsageError):
    """A table of choices that cannot be read."""


class PackError(UsageError):
    """A data set cannot be packed, a pack cannot be read, or memory has no room for it."""


class LabError(UsageError):
    """A cluster on this machine cannot be built as requested."""


class AuditError(UsageError):
    """A step with other bits than it has to have; the message names the step, the rank and what differs."""


class DecodeError(UnisonoError):
    """Image or audio data that cannot be decoded."""


class ScheduleError(UnisonoError):
    """A wrong schedule; the message names the rank, the lane, the round and the transfer."""


class StepError(UnisonoError):
    """A wrong step program; the message names the rank and the task."""


class MismatchError(UnisonoError):
    """Ranks make different collective calls; the message names two ranks and both calls."""


class PlaceMismatchError(MismatchError):
    """Ranks make the same allreduce, but of tensors at different places in shared memory, or on some in none."""


class StallError(UnisonoError):
    """Ranks have not entered a call; the message names the rank, the call, the missing ranks and their call sites."""


class OperationError(UnisonoError):
    """An operation of the engine has failed; the message names the operation that failed first."""


class BackendError(UnisonoError, RuntimeError):
    """An operation of torch.distributed has failed; the message names the rank, the operation and its number."""
