"""Proves, operation by operation, that a graph keeps the examples of a batch apart."""

from tf_adadp.gradients.proof.follow import Follower, inputs_of_rows
from tf_adadp.gradients.proof.values import Mixed, Mixes, Public, Rows, public

__all__ = ["Follower", "Mixed", "Mixes", "Public", "Rows", "inputs_of_rows", "public"]
