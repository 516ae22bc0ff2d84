"""Runs that go on when ranks die, are stopped or join: generations of ranks, forked by processes that wait."""
