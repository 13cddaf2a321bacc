"""Serves every room: checks of arguments, the process, flat groups of variables."""
