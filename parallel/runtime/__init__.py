"""Services shared by all training code: vector memory, profiler, collective errors, signals, throughput."""
