"""The names of the networks, known without loading PyTorch."""

NETWORKS = (
    "small_convnet",
    "resnet8",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
    "resnet50",
    "alexnet",
    "alexnet_bn",
    "overfeat_fast",
    "vgg_a",
    "vgg16",
    "vgg19",
    "googlenet",
    "googlenet_bn",
    "inception_bn",
    "cd_dnn",
)
"""The networks that a recipe can name; each is made for a number of classes and of channels."""
