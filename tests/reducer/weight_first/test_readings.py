"""Readings are counted; a copy knows no parameters."""

from __future__ import annotations

import copy
import pickle

import torch

from unisono.reducer.weight_first.readings import Readings


def test_a_reading_is_over_when_it_has_ended_as_often_as_it_has_begun() -> None:
    parameters, ended = [torch.zeros(1), torch.zeros(1)], list[int]()
    readings = Readings(parameters, 2, lambda: ended.append(1))
    reading = readings.of(parameters[1])
    assert reading is not None
    reading.begin()
    reading.begin()
    reading.end()
    assert not readings.are_over((0, 1))
    assert readings.are_over((0,))
    assert not ended
    reading.end()
    assert readings.are_over((0, 1))
    assert ended == [1]


def test_an_end_without_a_begin_does_not_count() -> None:
    weight, ended = torch.zeros(1), list[int]()
    reading = Readings([weight], 2, lambda: ended.append(1)).of(weight)
    assert reading is not None
    reading.end()
    assert not ended
    reading.begin()
    assert not reading.readings.are_over((0,))


def test_cleared_readings_are_over() -> None:
    weight = torch.zeros(1)
    readings = Readings([weight], 2, lambda: None)
    readings.begin(0)
    readings.clear()
    assert readings.are_over((0,))


def test_copies_know_no_parameters() -> None:
    weight = torch.zeros(1)
    readings = Readings([weight], 2, lambda: None)
    for one in (copy.deepcopy(readings), pickle.loads(pickle.dumps(readings))):
        assert one.of(weight) is None
    assert readings.of(torch.zeros(1)) is None
