"""Bounds that dp_accounting does not have, and their comparison."""
