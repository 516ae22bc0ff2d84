"""Time of collectives on a network: priced by a formula, estimated for a choice, or simulated flow by flow."""

from unisono.network.estimate import estimate
from unisono.network.links import DEFAULT, EVEN, Amount, Network, NetworkError, Uneven, shaped
from unisono.network.price import bound, price
from unisono.network.simulate import Simulated, simulate

__all__ = [
    "DEFAULT",
    "EVEN",
    "Amount",
    "Network",
    "NetworkError",
    "Simulated",
    "Uneven",
    "bound",
    "estimate",
    "price",
    "shaped",
    "simulate",
]
