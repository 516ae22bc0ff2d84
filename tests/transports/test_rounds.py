import numpy as np
import torch

from unisono.schedules.schedule import Action
from unisono.transports.arithmetic import arithmetic_of
from unisono.transports.rounds import reduce_arrivals
from unisono.transports.transport import Move


def test_arrivals_are_summed_in_rank_order() -> None:
    big, small = 2.0**53, 1.0  # big + small + small differs from small + small + big
    payload = np.array([small, 7.0])
    moves = [Move(Action.ADD, 3, slice(0, 1)), Move(Action.SEND, 0, slice(1, 2)), Move(Action.ADD, 0, slice(0, 1))]
    arrivals = [np.array([small]), None, np.array([big])]
    reduce_arrivals(1, payload, arithmetic_of(torch.float64), moves, arrivals)
    assert payload.tolist() == [(big + small) + small, 7.0]
    assert (big + small) + small != (small + small) + big
