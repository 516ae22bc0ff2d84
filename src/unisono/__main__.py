"""Entry point of `python -m unisono`, the same as `unisono`."""

from unisono.cli import main

main()
