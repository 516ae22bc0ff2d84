"""Timeline of a run: the spans of all ranks in lanes, the predicted spans of each step under the measured ones."""

from unisono.training.timeline.collect import Timeline, check_writable

__all__ = ["Timeline", "check_writable"]
