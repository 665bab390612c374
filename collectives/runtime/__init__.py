"""Runtime: from a call through a plan and a bound program to a request."""
