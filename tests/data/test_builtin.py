from unisono.data.builtin import BUILTIN_DATASETS
from unisono.data.splits import TRAIN_SAMPLES


def test_every_data_set_is_in_the_catalogue_with_its_size() -> None:
    assert {name: len(load().train) for name, load in BUILTIN_DATASETS.items()} == TRAIN_SAMPLES
