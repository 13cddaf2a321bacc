"""Differentially private principal components, and the layer that projects a model's inputs."""

from tf_adadp.pca.dppca import DPPCA
from tf_adadp.pca.layer import PCAProjection

__all__ = ["DPPCA", "PCAProjection"]
