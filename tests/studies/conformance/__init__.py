"""Checks that training on any mesh equals training on one rank."""
