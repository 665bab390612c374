"""Planning of a call: agreement of all ranks, choice of the algorithm, cached programs, and the planner."""
