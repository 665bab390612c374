"""For tools that still look for a setup.py; pyproject.toml holds all metadata."""

from setuptools import setup

setup()
