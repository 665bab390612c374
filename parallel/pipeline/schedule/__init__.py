"""Pipeline schedules without MPI: actions, schedules, lowering, simulation, formulas, search, drawing."""
