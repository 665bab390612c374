"""Data parallelism: gradient buckets, reducers, DDP, ZeRO, error feedback."""
