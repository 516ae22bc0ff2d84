"""Transports of a schedule's transfers: MPI messages, MPI shared windows, threads (for tests)."""
