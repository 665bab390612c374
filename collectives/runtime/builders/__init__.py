"""Builders of the programs of one communicator: over its transports, or of the MPI's own collectives."""
