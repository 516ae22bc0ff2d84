"""Prediction of a step's time, and choice of its setting, before it runs."""
