"""Ledgers in files: the format, atomic writes, locks, and a file that a run keeps up to date."""
