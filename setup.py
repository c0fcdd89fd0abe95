"""The metadata is in pyproject.toml; this file serves tools that still ask for setup.py."""

from setuptools import setup

setup()
