"""`python -m unisono` is `unisono`."""

from unisono.cli import main

main()
