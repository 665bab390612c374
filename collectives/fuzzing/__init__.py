"""Random sequences of collective calls, compared between the MPI and Chorus."""
