import torch
from sklearn import datasets

from unisono.data.builtin import BUILTIN_DATASETS, load_digits
from unisono.data.pack import TRAIN_SAMPLES


def test_every_data_set_is_in_the_catalogue_with_its_size() -> None:
    assert {name: len(load().train) for name, load in BUILTIN_DATASETS.items()} == TRAIN_SAMPLES


def test_real_digits_each_kind_in_both_parts() -> None:
    data = load_digits()
    assert data.train.inputs.shape == (1437, 1, 8, 8)
    assert data.test.inputs.shape == (360, 1, 8, 8)
    assert data.train.inputs.dtype == torch.float32
    assert (float(data.train.inputs.min()), float(data.train.inputs.max())) == (0, 1)
    assert set(data.train.labels.tolist()) == set(data.test.labels.tolist()) == set(range(10))


def test_they_are_scikit_learn_s() -> None:
    images, labels = datasets.load_digits(return_X_y=True)
    test = load_digits().test
    assert torch.equal(test.inputs.flatten(1), torch.from_numpy(images[::5] / 16).float())
    assert torch.equal(test.labels, torch.from_numpy(labels[::5]))


def test_no_image_of_the_test_set_is_trained_on() -> None:
    data = load_digits()
    train = {image.numpy().tobytes() for image in data.train.inputs}
    assert not train & {image.numpy().tobytes() for image in data.test.inputs}
