"""Provides helpers to all sub-packages: argument checks, flat groups of variables and more."""
