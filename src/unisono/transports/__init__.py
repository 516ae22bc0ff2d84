"""What carries the transfers of a schedule: MPI messages, MPI shared windows, threads (for tests)."""
