"""Gaussian noise: stateless, keyed, and added once per lot; and the keys that it is drawn under."""

from tf_adadp.noise.draws import add_gaussian, gaussian, gaussians, stream
from tf_adadp.noise.keys import SecretKey, new_key

__all__ = ["SecretKey", "add_gaussian", "gaussian", "gaussians", "new_key", "stream"]
