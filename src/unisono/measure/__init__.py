"""Measures the machine that it runs on: products, disk, links, collectives; one machine file for `plan` and `auto`."""
