import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.optimizers.groups import by_decay

shapes = st.lists(st.integers(1, 3), max_size=4).map(tuple)


@settings(deadline=None)
@given(kinds=st.lists(st.tuples(shapes, st.booleans()), max_size=8))
def test_each_trainable_parameter_is_in_its_group(kinds: list[tuple[tuple[int, ...], bool]]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape), requires_grad=learns) for shape, learns in kinds]
    groups = by_decay(parameters, 0.3)
    found = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
    assert found == {id(one): 0.3 if one.ndim > 1 else 0.0 for one in parameters if one.requires_grad}
    assert all(group["params"] for group in groups), "none is empty"
    assert sum(len(group["params"]) for group in groups) == len(found), "none is there twice"


def test_a_network_with_norms() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 2))
    decaying, others = by_decay(model.parameters(), 5e-4)
    assert [tuple(one.shape) for one in decaying["params"]] == [(8, 3, 3, 3), (2, 8)]
    assert [tuple(one.shape) for one in others["params"]] == [(8,), (8,), (8,), (2,)]
