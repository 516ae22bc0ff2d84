"""The names of the networks, known without loading PyTorch."""

CIFAR_LAYERS = (8, 20, 32, 44, 56, 110)
"""Of the residual networks for small pictures."""

NETWORKS = (
    "small_convnet",
    *(f"resnet{layers}" for layers in CIFAR_LAYERS),
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
