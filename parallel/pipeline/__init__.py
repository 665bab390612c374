"""Pipeline parallelism: schedules as lists of actions, simulated before and executed by one runner per stage."""
