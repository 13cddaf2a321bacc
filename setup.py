"""Packaging of tf_adadp, for tools that look for this file; pyproject.toml has the metadata."""

from setuptools import setup

setup()
