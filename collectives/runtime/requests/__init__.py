"""Requests that users hold: tests, waits, lists, handles for mpi4py, queues of channels, and the end of the program."""
