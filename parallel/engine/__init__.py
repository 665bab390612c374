"""Training engines: settings, the step that all engines share, memory ledger, the data-parallel engine."""
