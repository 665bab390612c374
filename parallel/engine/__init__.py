"""Training engines: settings, common training step, memory ledger (bytes per rank), data-parallel engine."""
