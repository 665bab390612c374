"""The algorithms: pure generators of rounds, one family a file. Nothing here knows MPI."""
