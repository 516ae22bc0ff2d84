"""Sweep: a run for each point of a grid over keys of a recipe (as in Theano-MPI, section 4).

plan.py ─▶ directory.py ─▶ run.py ─▶ results.py ─▶ report.py, heat_map.py, accuracy_chart.py
grid       files           acts      metrics       table, JSON, Markdown, SVG
"""
