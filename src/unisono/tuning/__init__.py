"""Measures links, finds out who shares a switch, times the candidates, and writes the table of choices."""
