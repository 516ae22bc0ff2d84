"""Operation of a rule of one's own that moves weights: `docs/rules.md` has it."""

from functools import cache

from unisono.step.operations import UNPACK_WEIGHTS
from unisono.step.program import Operation, Task
from unisono.step.symbolic_state import Stage, SymbolicState, each


@cache  # equal options give the same operation
def pull(strength: float) -> Operation:
    def act(replica, task, world):
        own, mean = replica.read_weights(task.key), replica.bucket(task.key)
        replica.write_weights(task.key, own.lerp(mean, strength))

    @each  # of the ranks that carry the task out together
    def symbolic(state: SymbolicState, task: Task) -> None:
        for parameter, contributions in state.take_means(task, Stage.WEIGHTS).items():
            parts = state.weights[parameter]
            parts[task.key] = state.versions.of("pull", strength, parts[task.key], frozenset(contributions.items()))

    return Operation("pull", act, symbolic, UNPACK_WEIGHTS.price)
