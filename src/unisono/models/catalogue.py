"""The names of the networks, known without loading PyTorch."""

NETWORKS = ("small_convnet", "resnet20", "alexnet_bn", "resnet50")
"""The networks that a recipe can name; each is made for a number of classes and of colours."""
