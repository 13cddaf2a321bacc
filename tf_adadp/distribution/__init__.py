"""Trains on several devices and several hosts."""

from tf_adadp.distribution import replicas, workers

__all__ = ["replicas", "workers"]
