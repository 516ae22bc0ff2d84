"""What a process group may be asked for."""

import pytest

from unisono.errors import UsageError
from unisono.torch_backend import Options
from unisono.torch_backend.options import WIRES as NAMES
from unisono.wires import WIRES


def test_wires_are_those_of_the_transports() -> None:
    assert set(NAMES) - {None} == set(WIRES)


@pytest.mark.parametrize("wrong", [{"wire": "float8"}, {"wire_from": -1}])
def test_wrong_values(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Options(**wrong)
