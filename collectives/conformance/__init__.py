"""mpi4py's own tests, run on `collectives.Communicator`."""
