"""What the benchmark and the demo share: sizes, cases, timing, rows, tables, pictures."""
