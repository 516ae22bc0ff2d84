"""Time of collectives on a network: priced by a formula, estimated for a choice, or simulated flow by flow."""

from unisono.network.estimate import estimate
from unisono.network.links import DEFAULT, Amount, Network, NetworkError, shaped
from unisono.network.price import price
from unisono.network.simulate import Simulated, simulate

__all__ = ["DEFAULT", "Amount", "Network", "NetworkError", "Simulated", "estimate", "price", "shaped", "simulate"]
