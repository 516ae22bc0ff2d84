from unisono.models.catalogue import NETWORKS
from unisono.models.table import MODELS


def test_every_network_is_in_the_catalogue() -> None:
    assert tuple(MODELS) == NETWORKS
