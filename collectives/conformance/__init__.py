"""mpi4py's own tests, run on our communicators."""
