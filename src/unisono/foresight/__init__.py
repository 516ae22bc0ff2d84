"""Foresight: predictions sealed before runs, measurements after them, and the ledger that compares both."""
