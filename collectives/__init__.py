"""Collective communication for NumPy and CuPy arrays, as schedules over MPI point-to-point."""

from collectives.communicator import Communicator, algorithms, predict
from collectives.requests import Request, start_all, test_all, wait_all

__all__ = ["Communicator", "Request", "algorithms", "predict", "start_all", "test_all", "wait_all"]
