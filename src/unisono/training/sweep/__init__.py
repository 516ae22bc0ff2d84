"""Sweep: a run for each point of a grid over keys of a recipe (as in Theano-MPI, section 4).

grid.py ─▶ directory.py ─▶ run.py ─▶ results.py ─▶ session.py
points     files           acts      metrics       prints, writes the report
"""
