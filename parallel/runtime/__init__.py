"""Services that all training code shares: vector memory, profiler, collective errors, signals, throughput."""
