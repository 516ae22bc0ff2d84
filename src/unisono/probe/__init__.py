"""Measures the machine that it runs on, and gives what it found as a machine file for `unisono plan`."""
