from unisono.data.catalogue import SAMPLES
from unisono.data.table import DATA


def test_every_data_set_is_in_the_catalogue_with_its_size() -> None:
    assert {name: len(load().train) for name, load in DATA.items()} == SAMPLES
