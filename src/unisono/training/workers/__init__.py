"""Training by an asynchronous rule: workers with loops of their own, servers, snapshots, replay."""
