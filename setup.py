"""The compiled extension only; everything else is in pyproject.toml."""

from setuptools import setup

setup()
