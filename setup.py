"""Everything is said in pyproject.toml; this file serves tools that still look for a setup.py."""

from setuptools import setup

setup()
