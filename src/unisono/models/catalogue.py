"""The names of the networks, known without loading PyTorch."""

NETWORKS = ("small_convnet",)
