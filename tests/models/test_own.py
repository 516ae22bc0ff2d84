import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from unisono.errors import RecipeError
from unisono.models.own import make_own, own_network
from unisono.own import is_own


def check_own(name: str, folder: str) -> None:
    own_network(name, folder).check()


def where_own(name: str, folder: str) -> str:
    return own_network(name, folder).where()


NETS = """
import torch
from own_beside import WIDTH

def wide(classes, channels):
    import own_late
    return torch.nn.Linear(channels * WIDTH, classes)

def number(classes, channels):
    return 3

value = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With own_nets.py and what it imports; the current folder is another. What is imported from here is forgotten."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    nets = tmp_path / "nets"
    nets.mkdir()
    (nets / "own_nets.py").write_text(NETS)
    (nets / "own_beside.py").write_text("WIDTH = 5\n")
    (nets / "own_late.py").write_text("")
    yield nets
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_name_with_a_colon_is_ones_own() -> None:
    assert is_own("nets:wide")
    assert not is_own("resnet20")


def test_it_is_made_with_its_folder_in_reach_and_python_looks_where_it_did_before(folder: Path) -> None:
    before = list(sys.path)
    check_own("own_nets:wide", str(folder))
    assert "own_nets" not in sys.modules, "nothing of it is run to check it"
    network = make_own("own_nets:wide", str(folder), 10, 3)
    assert isinstance(network, torch.nn.Linear)
    assert (network.in_features, network.out_features) == (15, 10)
    assert sys.path == before


def test_the_current_folder_is_looked_in_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    check_own("own_nets:wide", "")
    assert isinstance(make_own("own_nets:wide", "", 10, 3), torch.nn.Linear)


def test_packages_and_what_is_installed(folder: Path) -> None:
    (folder / "own_package").mkdir()
    (folder / "own_package" / "deep.py").write_text("import torch\nnet = torch.nn.Linear\n")
    check_own("own_package.deep:net", str(folder))
    assert isinstance(make_own("own_package.deep:net", str(folder), 10, 3), torch.nn.Linear)
    check_own("torch.nn:Linear", str(folder))
    assert isinstance(make_own("torch.nn:Linear", str(folder), 10, 3), torch.nn.Linear)


@pytest.mark.parametrize("make", [check_own, lambda name, folder: make_own(name, folder, 10, 3)])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_net:wide", r"'own_net:wide': there is no module own_net in .*nets, in .*here or where else"),
        ("own_nets:", "a network of your own is named module:function, as in nets:wide"),
        (":wide", "a network of your own is named module:function"),
        ("own/nets:wide", "a network of your own is named module:function"),
        ("own_nets:wide:er", "a network of your own is named module:function"),
    ],
)
def test_what_is_not_there_is_known_early(
    folder: Path, make: Callable[[str, str], object], name: str, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        make(name, str(folder))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_nets.deep:wide", r"there is no module own_nets\.deep in"),
        ("own_nets:wid", r"own_nets\.py has no function wid; did you mean own_nets:wide\?"),
        ("own_nets:zzz", r"own_nets\.py has no function zzz$"),
        ("own_nets:value", r"own_nets\.py has no function value"),
        ("own_nets:number", r"number\(10, 3\) gave int, not a torch\.nn\.Module"),
    ],
)
def test_what_makes_no_network_is_told(folder: Path, name: str, words: str) -> None:
    before = list(sys.path)
    with pytest.raises(RecipeError, match=words):
        make_own(name, str(folder), 10, 3)
    assert sys.path == before


def test_what_goes_wrong_inside_of_it_is_its_own(folder: Path) -> None:
    """It shows where, as in any program."""
    (folder / "own_broken.py").write_text("import own_missing\n")
    (folder / "own_strict.py").write_text("def wide(classes): ...\n")
    with pytest.raises(ModuleNotFoundError, match="own_missing"):
        make_own("own_broken:wide", str(folder), 10, 3)
    with pytest.raises(TypeError, match="wide"):
        make_own("own_strict:wide", str(folder), 10, 3)


def test_where_it_lies_is_said_and_nothing_of_it_run(folder: Path) -> None:
    assert where_own("own_nets:wide", str(folder)).startswith(f"module own_nets, from {folder}/own_nets.py (model.name")
    (folder / "own_other").mkdir()
    for name in ("own_other.deep:wide", "own_other:wide"):
        assert f", from {folder}/own_other (" in where_own(name, str(folder))
    assert not {"own_nets", "own_other"} & sys.modules.keys()
