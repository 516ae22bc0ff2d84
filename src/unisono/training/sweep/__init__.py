"""Sweep: a run for each point of a grid over keys of a recipe (as in Theano-MPI, section 4).

grid.py ─▶ run.py ─▶ results.py
points     acts      metrics, report
"""
