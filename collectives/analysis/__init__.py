"""Analysis of schedules in one process: proof, simulated time, drawings."""
