"""No overlap: the main thread runs all collectives once the backward pass has ended. Baseline of the other overlaps.

lane main    ──backward──▶│ [allreduce 1][allreduce 2][allreduce 3]
"""

from unisono.step.overlaps.funnel import place
from unisono.step.overlaps.overlap import Overlap

none = Overlap(place, by_main=True, after=True)
