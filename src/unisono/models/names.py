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

SHAPES = {
    "overfeat_fast": (3, 231, 231),
    "small_convnet": (1, 8, 8),
    **{f"resnet{layers}": (3, 32, 32) for layers in CIFAR_LAYERS},
    "cd_dnn": (440,),
    "gpt_small": (128,),
}
"""Shape of a sample, for networks that do not take images of 224 x 224."""


def input_shape(name: str, size: int = 0) -> tuple[int, ...]:
    """Return the shape of a network's samples, as in its paper, or with images of `size` x `size` pixels."""
    shape = SHAPES.get(name, (3, 224, 224))
    return (shape[0], size, size) if size and len(shape) > 1 else shape
