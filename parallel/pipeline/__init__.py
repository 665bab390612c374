"""Pipeline parallelism: schedules are lists of actions; one simulator proves and times them, one runner executes them."""
