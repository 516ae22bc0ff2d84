"""Training steps as programs: the parts that rules are written with, and the modules that read them."""
