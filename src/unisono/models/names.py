"""Names of the networks, known without loading PyTorch."""

CIFAR_LAYERS = (8, 20, 32, 44, 56, 110)
"""Numbers of layers of the residual networks for small images."""

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
    "gpt_small",
)
"""Networks that a recipe can name. Each is made from numbers of classes and channels."""
