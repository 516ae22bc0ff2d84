"""A training step as a program: what a rule is written with, and what reads it."""
