"""Pipeline parallelism: schedules as lists of actions, first simulated, then executed by one runner per stage."""
