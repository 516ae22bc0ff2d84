"""Measures links, finds the nodes that share a switch, times the candidates, and writes the table of choices."""
