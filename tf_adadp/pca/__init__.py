"""Differentially private principal components, and layers that use them on a model's inputs."""

from tf_adadp.pca.dppca import DPPCA
from tf_adadp.pca.layer import PCAProjection
from tf_adadp.pca.whitening import ZCAWhitening

__all__ = ["DPPCA", "PCAProjection", "ZCAWhitening"]
