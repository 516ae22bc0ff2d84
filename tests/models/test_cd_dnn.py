import torch
from torch.nn.functional import cross_entropy

from unisono.models.cd_dnn import CDDNN


def test_seven_hidden_layers() -> None:
    with torch.device("meta"):
        layers = [module for module in CDDNN(10).modules() if isinstance(module, torch.nn.Linear)]
    assert [layer.out_features for layer in layers] == [2048] * 7 + [10]


def test_a_recording_is_the_mean_of_its_windows_posteriors_in_logarithms() -> None:
    torch.manual_seed(0)
    model, windows = CDDNN(3, 5), torch.randn(2, 4, 5)
    with torch.no_grad():
        found = model(windows)
        expected = torch.zeros(2, 3)
        for sample in range(2):
            for window in range(4):
                (scores,) = model.layers(windows[sample, window][None])
                expected[sample] += torch.log(torch.exp(scores) / torch.exp(scores).sum()) / 4
    torch.testing.assert_close(found, expected)
    assert (expected[0] - expected[1]).abs().max() > 1e-3, "recordings that all look alike agree with anything"


def test_a_single_window_needs_no_windows_dimension() -> None:
    torch.manual_seed(0)
    model, windows = CDDNN(3, 5), torch.randn(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(windows), model(windows[:, None]))
        torch.testing.assert_close(model(windows).exp().sum(dim=1), torch.ones(2))
        labels = torch.tensor([0, 2])
        torch.testing.assert_close(cross_entropy(model(windows), labels), cross_entropy(model.layers(windows), labels))
