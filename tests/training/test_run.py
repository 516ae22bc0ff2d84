"""What a recipe asks for, made: its network. The rest needs ranks: tests/mpi."""

from contextlib import nullcontext

import pytest
import torch

from unisono.errors import RecipeError
from unisono.models import make_network
from unisono.training.run import check_fit


@pytest.mark.parametrize(("name", "shape"), [("small_convnet", (1, 1, 32, 32)), ("cd_dnn", (1, 1, 8, 8))])
def test_a_network_that_does_not_take_the_data_is_reported(name: str, shape: tuple[int, ...]) -> None:
    model = make_network(name, "", 10, shape[1])
    with pytest.raises(RecipeError, match=rf"'{name}' does not take samples of {' x '.join(map(str, shape[1:]))}"):
        check_fit(model, name, torch.zeros(shape), 10, nullcontext)


def test_a_network_that_takes_the_data_and_one_of_ones_own() -> None:
    check_fit(make_network("small_convnet", "", 10, 1), "small_convnet", torch.zeros(1, 1, 8, 8), 10, nullcontext)
    check_fit(torch.nn.Linear(3, 4), "nets:mine", torch.zeros(1, 3), 4, nullcontext)
    check_fit(torch.nn.Linear(3, 4), "nets:mine", torch.zeros(1, 5), 4, nullcontext)  # its own error comes in training


def test_a_trial_leaves_a_networks_modes_as_they_are() -> None:
    """Also where it fails: this norm needs two samples."""
    frozen, norm = torch.nn.Dropout().eval(), torch.nn.BatchNorm1d(4, track_running_stats=False)
    for network in (torch.nn.Sequential(frozen, torch.nn.Linear(4, 4)), torch.nn.Sequential(frozen, norm)):
        check_fit(network, "nets:mine", torch.zeros(1, 4), 4, nullcontext)
        assert [module.training for module in network.modules()] == [True, False, True]


@pytest.mark.parametrize("classes", [3, 5])
def test_a_network_has_a_score_for_each_class(classes: int) -> None:
    with pytest.raises(RecipeError, match=f"'nets:mine' has 4 scores, but the data have {classes} classes"):
        check_fit(torch.nn.Linear(2, 4), "nets:mine", torch.zeros(1, 2), classes, nullcontext)


def test_a_vocabulary_may_be_padded() -> None:
    tokens = torch.zeros(1, 7, dtype=torch.int64)
    check_fit(torch.nn.Embedding(8, 8), "nets:mine", tokens, 5, nullcontext)
    check_fit(
        torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Flatten(0, 1)), "nets:mine", tokens, 5, nullcontext
    )
    with pytest.raises(RecipeError, match="has 8 scores, but the data have 9 classes"):
        check_fit(torch.nn.Embedding(8, 8), "nets:mine", tokens, 9, nullcontext)
