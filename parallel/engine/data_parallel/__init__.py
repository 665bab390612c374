"""Data parallelism: gradient buckets and their reduction, DDP, ZeRO, error feedback, sharded optimizer."""
