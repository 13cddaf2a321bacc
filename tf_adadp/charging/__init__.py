"""Charges releases: each release is covered by one charge, made before it."""
