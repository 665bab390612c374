"""Pipeline parallelism: schedules are lists of actions, proved and timed by one simulator, executed by one runner."""
