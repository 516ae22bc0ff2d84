"""The one place that loads MPI: importing it starts MPI (MPI_Init), with threads allowed everywhere."""

from unisono.errors import LaunchError
from unisono.launch import EXTRA

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError where it finds no library
    raise LaunchError(f"no MPI library can be loaded ({str(error).splitlines()[0]}); {EXTRA}") from error

__all__ = ["MPI"]
