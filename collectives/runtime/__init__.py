"""Execution of collective calls: validation, choice of algorithm, binding to memory and transports, requests."""
