import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from unisono.errors import RecipeError
from unisono.models import make_network
from unisono.rules import Exchange
from unisono.training.recipe import RuleRecipe
from unisono.training.recipe_check import own_rule
from unisono.user_function import UserFunction, is_user_function


def check_user_network(name: str, folder: str) -> None:
    UserFunction("model", name, folder).check()


def describe_user_network(name: str, folder: str) -> str:
    return UserFunction("model", name, folder).where()


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
    """Folder with own_nets.py and what it imports; the current folder is another. Forgets the imported modules."""
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


def test_a_name_with_a_colon_is_user_defined() -> None:
    assert is_user_function("nets:wide")
    assert not is_user_function("resnet20")


def test_its_folder_is_searched_and_sys_path_restored(folder: Path) -> None:
    before = list(sys.path)
    check_user_network("own_nets:wide", str(folder))
    assert "own_nets" not in sys.modules, "nothing of it is run to check it"
    network = make_network("own_nets:wide", str(folder), 10, 3)
    assert isinstance(network, torch.nn.Linear)
    assert (network.in_features, network.out_features) == (15, 10)
    assert sys.path == before


def test_the_current_folder_is_searched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    check_user_network("own_nets:wide", "")
    assert isinstance(make_network("own_nets:wide", "", 10, 3), torch.nn.Linear)


def test_packages_and_installed_modules(folder: Path) -> None:
    (folder / "own_package").mkdir()
    (folder / "own_package" / "deep.py").write_text("import torch\nnet = torch.nn.Linear\n")
    check_user_network("own_package.deep:net", str(folder))
    assert isinstance(make_network("own_package.deep:net", str(folder), 10, 3), torch.nn.Linear)
    check_user_network("torch.nn:Linear", str(folder))
    assert isinstance(make_network("torch.nn:Linear", str(folder), 10, 3), torch.nn.Linear)


@pytest.mark.parametrize("make", [check_user_network, lambda name, folder: make_network(name, folder, 10, 3)])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_net:wide", r"'own_net:wide': there is no module own_net in .*nets, in .*here or on sys.path"),
        ("own_nets:", "a network is named module:function, for example nets:wide"),
        (":wide", "a network is named module:function"),
        ("own/nets:wide", "a network is named module:function"),
        ("own_nets:wide:er", "a network is named module:function"),
    ],
)
def test_missing_modules_are_reported_without_importing(
    folder: Path, make: Callable[[str, str], object], name: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        make(name, str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nets.deep:wide", r"there is no module own_nets\.deep in"),
        ("own_nets:wid", r"own_nets\.py has no function wid; did you mean own_nets:wide\?"),
        ("own_nets:zzz", r"own_nets\.py has no function zzz$"),
        ("own_nets:value", r"own_nets\.py has no function value"),
        ("own_nets:number", r"number\(10, 3\) returned int, not a torch\.nn\.Module"),
    ],
)
def test_functions_that_return_no_network_are_refused(folder: Path, name: str, message: str) -> None:
    before = list(sys.path)
    with pytest.raises(RecipeError, match=message):
        make_network(name, str(folder), 10, 3)
    assert sys.path == before


def test_exceptions_of_the_module_pass_through(folder: Path) -> None:
    """It shows where, as in any program."""
    (folder / "own_broken.py").write_text("import own_missing\n")
    (folder / "own_wrong.py").write_text("def wide(classes, channels):\n    return classes + 'a'\n")
    with pytest.raises(ModuleNotFoundError, match="own_missing"):
        make_network("own_broken:wide", str(folder), 10, 3)
    with pytest.raises(TypeError, match="unsupported operand"):
        make_network("own_wrong:wide", str(folder), 10, 3)


def test_a_function_with_another_signature_is_refused(folder: Path) -> None:
    (folder / "own_strict.py").write_text("def wide(classes): ...\n")
    message = r"'own_strict:wide': it is called as wide\(classes, channels\), which gives wide\(\) takes 1 positional"
    with pytest.raises(RecipeError, match=message):
        make_network("own_strict:wide", str(folder), 10, 3)
    rule = own_rule(RuleRecipe("os:system"))
    with pytest.raises(
        RecipeError, match=r"rule.name = 'os:system': it is called as system\(exchange, overlap\), which"
    ):
        rule.call(Exchange(), "auto")


def test_its_location_is_found_without_importing(folder: Path) -> None:
    assert describe_user_network("own_nets:wide", str(folder)).startswith(
        f"module own_nets, from {folder}/own_nets.py (model.name"
    )
    (folder / "own_other").mkdir()
    for name in ("own_other.deep:wide", "own_other:wide"):
        assert f", from {folder}/own_other (" in describe_user_network(name, str(folder))
    assert not {"own_nets", "own_other"} & sys.modules.keys()
