"""The wires: how a bound message travels."""
