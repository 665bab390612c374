"""Methods of communicators: those of the collectives, generated from declarations, and those inherited from mpi4py."""
