import inspect

from unisono import errors


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    drawn = {}
    for line in errors.__doc__.splitlines():
        words = line.replace("│", " ").split()
        names = [word for word in words if word in {kind.__name__ for kind in kinds}]
        if names and ("──" in line or names[0] == "UnisonoError"):
            drawn[names[0]] = line.index(names[0])
    assert set(drawn) == {kind.__name__ for kind in kinds}
    for kind in kinds:
        depth = len([base for base in kind.__mro__ if base.__module__ == errors.__name__])
        assert drawn[kind.__name__] - drawn["UnisonoError"] == 4 * (depth - 1), kind
