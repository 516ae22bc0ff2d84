"""Control message of a step: ranks share samples and requests in one small sum, before their gradients are averaged.

    rank 0   8 samples                 ─▶ [8, 1, 0, ..., 0, 0]  ┐
    rank 1   5 samples, request "save" ─▶ [5, 1, 0, ..., 1, 0]  ┼ sum ─▶ 13 samples, given by 2 ranks; {"save"}
    rank 2   has no batch: absent      ─▶ [0, 0, 0, ..., 0, 0]  ┘        weights 8/13, 5/13, 0

Every rank decodes the same sum, so all find the same weights, the same error and the same requests. Each rank is named
by one bit, so names add up without a carry. n numbers x differ where n * sum(x * x) is not sum(x) ** 2 (Cauchy and
Schwarz): so a sum shows first dimensions of inputs that differ, and numbers of changes of the weights. Where the latter
do, ranks compare the weights.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from unisono.errors import UsageError

REQUEST_KINDS = ("save", "stop", "join", "copy", "skip")
"""Kinds of requests that a rank can make of all ranks; "skip": a pass was left out."""

RANKS_PER_NUMBER = 48
"""Ranks whose bits one number holds: a float64 holds integers up to 2**53 exactly."""

MAX_EXACT_INTEGER = 2.0**53


@dataclass(eq=False)
class ControlMessage:
    """Control message of one rank in a backward pass; the last two are not sent."""

    samples: float | None = None
    """Samples that its loss is a mean of, as given by the program; None where none were given."""
    absent: bool = False
    """True where the rank has no gradients in this step and gave no samples: its weight is 0."""
    first_dimension: int | None = None
    """First dimension of its last input, where one was seen. Used for a warning only."""
    requests: frozenset[str] = frozenset()
    changes: int | None = None
    """Number of times that its weights have changed in place since the last pass; None where they are not compared."""
    expected_weight: float | None = None
    """Factor of this rank's gradients that the result will most likely give; None where nothing may be expected."""
    result: ControlResult | None = None
    """Sum of all ranks' messages; None until it is known."""

    @property
    def contributes(self) -> bool:
        """True where the rank's gradients count: it is not absent, and did not give 0 samples."""
        return self.samples != 0 and not self.absent


@dataclass(frozen=True)
class ControlResult:
    """Control message of a step, as all ranks have it."""

    samples: float
    """Number of samples of all ranks."""
    samples_given: int
    """Number of ranks that gave their samples."""
    without_samples: tuple[int, ...]
    """Ranks that have gradients but gave no samples."""
    uneven: bool
    """True where the inputs' first dimensions are known to differ."""
    requested: Mapping[str, tuple[float, float]]
    """Kinds that were requested, each with the number of ranks that did so, and the sum of their numbers."""
    changes_differ: bool = False
    """True where weights have changed more often on some ranks than on others."""
    difference: str = ""
    """Error of all ranks where they have compared their weights, which differ; else empty."""

    @property
    def requests(self) -> Mapping[str, str]:
        """Kinds that were requested, each with its origin: "rank 2", or "3 ranks"."""
        return {kind: requested_by(*ranks) for kind, ranks in self.requested.items()}

    def weight_of(self, message: ControlMessage) -> float:
        """Return the factor of a rank's gradients in the average: its share of samples, or 1/n where none gave any."""
        if not message.contributes:
            return 0.0
        if message.samples is None:
            return 1.0 / len(self.without_samples)
        return message.samples / self.samples

    def error(self) -> UsageError | None:
        """Return the error of all ranks where weights differ, a share has no pass, or samples lack; else None."""
        if self.difference:
            return UsageError(self.difference)
        if "skip" in self.requested:
            return UsageError(
                f"a share of unisono.shares had no backward pass on {self.requests['skip']}, and would count as zeros: "
                "call backward() for each share; to leave out a batch, leave out the loop on all ranks"
            )
        if not self.samples_given or not self.without_samples:
            return None
        have = "has" if len(self.without_samples) == 1 else "have"
        others = "other rank has" if self.samples_given == 1 else "other ranks have"
        return UsageError(
            f"{names_of(self.without_samples)} {have} not given the number of samples of the loss, but "
            f"{self.samples_given} {others}: call unisono.add_samples(model, n) before backward() on every rank, or on "
            "none"
        )

    def warning(self, before: bool) -> str | None:
        """Return the warning where no rank gave its samples although they seem to differ; else None.

        `before`: True where ranks gave samples for an earlier average.
        """
        if self.samples_given or len(self.without_samples) < 2 or not (self.uneven or before):
            return None
        reason = (
            "the first dimensions of the ranks' inputs differ"
            if self.uneven
            else "samples were given for an earlier average, and count for that one alone"
        )
        return (
            f"{reason}, but no rank has given the number of samples of its loss, so all ranks have the same weight: "
            "call unisono.add_samples(model, n) before each backward(), on every rank"
        )


def encode(message: ControlMessage, rank: int, size: int) -> list[float]:
    """Return a rank's message as numbers, to be summed over all `size` ranks."""
    silent = message.samples is None and not message.absent
    asked = [float(kind in message.requests) for kind in REQUEST_KINDS]
    return [
        message.samples or 0.0,
        float(message.samples is not None),
        *_powers(message.first_dimension if silent else None),
        *_powers(message.changes),
        *asked,
        *(count * rank for count in asked),
        *rank_bit(rank if silent else None, size),
    ]


def decode(sums: Sequence[float]) -> ControlResult:
    """Return the messages of all ranks, decoded from the sums of their numbers."""
    (samples, given), firsts, changes, rest = sums[:2], sums[2:5], sums[5:8], sums[8:]
    kinds = len(REQUEST_KINDS)
    asked = zip(REQUEST_KINDS, rest[:kinds], rest[kinds : 2 * kinds], strict=True)
    requested = {kind: (count, ranks) for kind, count, ranks in asked if count}
    without_samples = ranks_of(rest[2 * kinds :])
    return ControlResult(samples, int(given), without_samples, _differ(*firsts), requested, _differ(*changes))


def _powers(value: int | None) -> tuple[float, float, float]:
    """Return the powers 0, 1 and 2 of a number; zeros for None."""
    return (0.0, 0.0, 0.0) if value is None else (1.0, float(value), float(value) ** 2)


def _differ(count: float, total: float, squares: float) -> bool:
    """Return True where numbers with these sums of powers are not all alike."""
    return count * squares < MAX_EXACT_INTEGER and count * squares != total * total


def rank_bit(rank: int | None, size: int) -> list[float]:
    """Return numbers in which the bit of a rank is set; that of none for None. They add up to the bits of all ranks."""
    bits = [0.0] * -(-size // RANKS_PER_NUMBER)
    if rank is not None:
        bits[rank // RANKS_PER_NUMBER] = 2.0 ** (rank % RANKS_PER_NUMBER)
    return bits


def ranks_of(sums: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose bits are set in a sum of such numbers."""
    ranks = range(len(sums) * RANKS_PER_NUMBER)
    return tuple(rank for rank in ranks if int(sums[rank // RANKS_PER_NUMBER]) >> rank % RANKS_PER_NUMBER & 1)


def difference_of(changes: Sequence[int | None], digests: Sequence[int]) -> str:
    """Return the error of ranks whose weights differ, from each one's number of changes and digest of the weights;
    empty where they are equal: a rank that has changed its weights has restored them, or has sent them to the
    others."""
    compared = [rank for rank, count in enumerate(changes) if count is not None]
    if len({digests[rank] for rank in compared}) < 2:
        return ""
    unchanged = [rank for rank in compared if not changes[rank]]
    if unchanged:
        changed = [rank for rank in compared if changes[rank]]
        return (
            f"the weights were changed on {names_of(changed)}, but not on {names_of(unchanged)}, so ranks differ (an "
            "optimizer step, load_state_dict or an assignment on some ranks alone): make it on all ranks, after the "
            "same backward passes, or on none; a rank without a batch calls unisono.synchronize(model) in place of "
            "backward(), and then makes the step as all do"
        )
    first, other = compared[0], next(rank for rank in compared if changes[rank] != changes[compared[0]])
    return (
        f"the weights of ranks differ: since the last backward pass there were {changes[first]} changes in place on "
        f"rank {first}, {changes[other]} on rank {other}: make the same steps on all ranks; what one rank has loaded "
        "or changed alone, send to the others by world.broadcast(parameter.data)"
    )


def requested_by(count: float, ranks: float) -> str:
    """Return the origin of a request in words: `count` ranks made it, and their numbers have the sum `ranks`."""
    return f"rank {ranks:.0f}" if count == 1 else f"{count:.0f} ranks"


def names_of(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 2", or "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


class StepControl:
    """Control messages of one rank of `ranks`."""

    def __init__(self, rank: int, ranks: int, wait: Callable[[], None]) -> None:
        """Begin without samples and requests; `wait` waits until the result of the last message is known."""
        self._rank, self._ranks, self._wait = rank, ranks, wait
        self.samples: float | None = None
        """Samples that the next average's loss is a mean of, as given by the program; None where none were given."""
        self.averages = 0
        """Number of averages that have ended."""
        self._first_dimension: int | None = None  # first dimension of the last input since the last average
        self._requests: set[str] = set()  # of this rank, not yet sent
        self._last: ControlMessage | None = None
        self._reported: ControlResult | None = None  # the last result whose error or warning was reported
        self._samples_ever_given = self._warned = False

    @property
    def failed(self) -> bool:
        """True where the last pass has failed; before the first one, too."""
        return self._last is None

    def add_samples(self, samples: float) -> None:
        """Add to the number of samples that the next average's loss is a mean of. Raises UsageError for one that is
        negative or not finite."""
        if not math.isfinite(samples) or samples < 0:
            raise UsageError(
                f"unisono.add_samples(model, {samples}): the number of samples must be finite, and 0 or more"
            )
        self.samples = (self.samples or 0.0) + samples

    def record_input(self, first: torch.Tensor | None) -> bool:
        """Record the first input of a forward pass, whose first dimension is compared where no samples are given.

        Return True for the first forward pass since the last average.
        """
        began = self._first_dimension is None
        self._first_dimension = first.size(0) if first is not None and first.dim() else 1
        return began

    def request(self, kind: str) -> None:
        """Request one of REQUEST_KINDS of all ranks with the next control message; a signal handler may call it."""
        if kind not in REQUEST_KINDS:
            raise UsageError(f"there is no request {kind!r}; there are {', '.join(REQUEST_KINDS)}")
        self._requests.add(kind)

    def requests(self) -> Mapping[str, str]:
        """Return the requests of the last control message, each with its origin; wait for that message alone."""
        if self._last is not None and self._last.result is None:
            self._wait()
        return {} if self._result is None else self._result.requests

    def requested_by_all(self, kind: str) -> bool:
        """Return True where all ranks have made a request with the last control message."""
        return self._result is not None and self._result.requested.get(kind, (0, 0))[0] == self._ranks

    def begin(self, absent: bool, changes: int | None = None) -> ControlMessage:
        """Return the message of a pass that begins. Requests that the last pass has not sent are in it again."""
        if self._last is not None and self._last.result is None:  # its step had no control message
            self._requests |= self._last.requests
        message = ControlMessage(self.samples, absent, self._first_dimension, frozenset(self._requests), changes)
        message.expected_weight = self._expected_weight(message)
        self._requests -= message.requests
        self._last = message
        return message

    def end_pass(self) -> None:
        """Begin to count the samples of the next average: those of this one were sent."""
        self.samples = self._first_dimension = None
        self.averages += 1

    def discard(self, message: ControlMessage | None, newest: bool) -> None:
        """Make the requests of a failed pass again, but for "skip"; of the `newest`, or of none that had begun, discard
        the samples."""
        if newest:
            self.end_pass()
            self._last = None
        if message is not None:
            self._requests |= message.requests - {"skip"}

    def check(self) -> None:
        """Raise the error, or issue the warning, of the last control message: once, when its result is known."""
        result = self._result
        if result is None or result is self._reported:
            return
        self._reported = result
        if (error := result.error()) is not None:
            raise error
        warning = result.warning(self._samples_ever_given)
        self._samples_ever_given = self._samples_ever_given or bool(result.samples_given)
        if warning is not None and not self._warned and self._rank == 0:
            self._warned = True
            warnings.warn(warning, stacklevel=2)

    def _expected_weight(self, message: ControlMessage) -> float | None:
        """Return the weight of a message if all ranks are like it. With samples it is the last one of as many, if that
        is a power of two: a product with it and then with what it lacks has the bits of one, so that no gradient
        depends on steps before."""
        if not message.contributes or message.samples is None:
            return 1.0 / self._ranks if message.contributes else None
        if self._last is None or self._last.samples != message.samples or self._result is None:
            return None
        weight = self._result.weight_of(self._last)
        return weight if math.frexp(weight)[0] == 0.5 else None

    @property
    def _result(self) -> ControlResult | None:
        return None if self._last is None else self._last.result
