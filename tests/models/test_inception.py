import torch

from unisono.models.inception import (
    GOOGLENET_MODULES,
    INCEPTION_MODULES,
    TORCH_MODULES,
    GoogLeNet,
    Inception,
    InceptionBN,
    InceptionModule,
    TorchGoogLeNet,
    googlenet_bn,
)


def test_nearly_half_of_the_parameters_are_the_auxiliary_classifiers() -> None:
    with torch.device("meta"):
        model = GoogLeNet(1000)
    assert sum(parameter.numel() for parameter in model.auxiliaries.parameters()) == 6_379_728
    assert sum(parameter.numel() for parameter in model.parameters()) - 6_379_728 == 6_998_552


def test_it_has_22_layers_with_parameters() -> None:
    with torch.device("meta"):
        model = GoogLeNet(10)
    alone = [module for module in model.first.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(alone) + 2 * len(GOOGLENET_MODULES) + 1 == 22, "a module is two deep, the classifier one"


def test_three_scores_in_training_and_one_after_it() -> None:
    with torch.device("meta"):
        model, images = GoogLeNet(10), torch.zeros(2, 3, 224, 224)
        assert [scores.shape for scores in model(images)] == [(2, 10)] * 3
        assert model.eval()(images).shape == (2, 10)
        assert googlenet_bn(10)(images).shape == (2, 10), "it has no auxiliary ones"


def test_a_module_concatenates_its_branches() -> None:
    with torch.device("meta"):
        for name, sizes in GOOGLENET_MODULES.items():
            outputs = Inception(sizes, norm=False)(torch.zeros(1, sizes[0], 7, 7))
            assert outputs.shape == (1, sizes[1] + sizes[3] + sizes[5] + sizes[6], 7, 7), name


def test_an_auxiliary_classifier_gives_gradients_to_lower_layers_only() -> None:
    with torch.device("meta"):
        model = GoogLeNet(10)
        _, first, second = model(torch.zeros(1, 3, 224, 224))
    first.sum().backward(retain_graph=True)
    assert all(parameter.grad is not None for parameter in model.third.parameters())
    assert all(parameter.grad is None for parameter in model.fourth.parameters())
    second.sum().backward()
    assert all(parameter.grad is not None for parameter in model.fourth.parameters())
    assert all(parameter.grad is None for parameter in (*model.fifth.parameters(), *model.classifier.parameters()))


def test_with_norms_no_convolution_has_a_bias() -> None:
    with torch.device("meta"):
        model = googlenet_bn(10)
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(convolutions) == len(norms) == 3 + 6 * len(GOOGLENET_MODULES)
    assert all(convolution.bias is None for convolution in convolutions)


def test_size_with_biases() -> None:
    """MXNet's and Caffe's networks have a bias in each normalised convolution."""
    with torch.device("meta"):
        model = InceptionBN(1000)
    biases = sum(module.out_channels for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    assert sum(parameter.numel() for parameter in model.parameters()) + biases == 11_295_240


def test_modules_fit_each_other_and_two_halve_the_size() -> None:
    with torch.device("meta"):
        features, sizes = torch.zeros(1, 192, 28, 28), list[int]()
        for row in INCEPTION_MODULES:
            features = InceptionModule(row)(features)
            sizes.append(features.shape[2])
    assert sizes == [28, 28, 14, 14, 14, 14, 14, 7, 7, 7]
    assert features.shape[1] == 1024


def test_a_module_that_halves_the_size_has_a_pool_branch() -> None:
    module = InceptionModule(INCEPTION_MODULES[2]).eval()
    inputs = torch.rand(1, 320, 6, 6)
    pooled = torch.nn.functional.max_pool2d(inputs, 3, 2, 1)
    assert torch.equal(module(inputs)[:, -320:], pooled)


def test_the_parts_of_torchs_network_have_the_sizes_of_its_file() -> None:
    with torch.device("meta"):
        model = TorchGoogLeNet(1000)
    sizes = [
        sum(parameter.numel() for part in parts for parameter in part.parameters())
        for parts in ([model.lower], [model.upper, model.classifier], [model.auxiliary])
    ]
    assert sizes == [5_602_880, 11_128_264, 2_416_744]
    convolutions = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(convolutions) == len(norms)
    assert all(convolution.bias is not None for convolution in convolutions)
    assert {norm.eps for norm in norms} == {1e-3}


def test_torchs_network_halves_the_size_by_convolutions_and_has_two_scores_in_training() -> None:
    with torch.device("meta"):
        model, images = TorchGoogLeNet(10), torch.zeros(2, 3, 224, 224)
        lower = model.lower(images)
        assert lower.shape == (2, 576, 14, 14)
        assert model.upper(lower).shape == (2, 1024, 7, 7)
        assert [scores.shape for scores in model(images)] == [(2, 10)] * 2
        for sizes in TORCH_MODULES.values():
            assert InceptionModule(sizes)(torch.zeros(1, sizes[0], 14, 14)).shape[2] == 14
        assert model.eval()(images).shape == (2, 10)


def test_the_auxiliary_classifier_of_torchs_network_gives_gradients_to_lower_layers_only() -> None:
    with torch.device("meta"):
        model = TorchGoogLeNet(10)
        _, auxiliary = model(torch.zeros(1, 3, 224, 224))
    auxiliary.sum().backward()
    assert all(parameter.grad is not None for parameter in model.lower.parameters())
    assert all(parameter.grad is None for parameter in (*model.upper.parameters(), *model.classifier.parameters()))
