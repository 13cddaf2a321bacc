"""DPPCA: principal components of private records."""

import json
import math
import os
from collections.abc import Iterable
from typing import Self

import dp_accounting
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from tf_adadp import noise
from tf_adadp.accounting import PrivacyLedger
from tf_adadp.pca.layer import PCAProjection
from tf_adadp.pca.rows import raw_rows, row_blocks, unit_rows
from tf_adadp.pca.whitening import ZCAWhitening
from tf_adadp.utils import checks
from tf_adadp.utils.silence import silent

_RELATIONS = {
    "add_or_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
# The norm by which one record moves the upper triangle of A, under each relation.
_SENSITIVITY = {"add_or_remove": 1.0, "replace_one": math.sqrt(2.0)}
_FITTED = ("components_", "explained_variance_", "explained_variance_ratio_")


class DPPCA:
    """Finds principal components from a noisy second moment ("Analyze Gauss").

        pca = DPPCA(60, noise_multiplier=16.0).fit(x_train)
        model = DPModel(keras.Sequential([keras.Input((28, 28)), pca.layer(), ...]))

    With records flattened to rows and normalised, x ← x/‖x‖₂ (rows of zeros, and rows with a NaN or
    an infinity, count as 0), `fit` releases

        B = A + E,    A = Σ x xᵀ    (not centred, not divided by N),    [d, d]

    where E is symmetric with independent N(0, σ²) on and above its diagonal, σ = noise_multiplier.
    The components are the eigenvectors of B with the largest eigenvalues; they and the noisy
    eigenvalues are post-processing. Dwork, Talwar, Thakurta and Zhang (2014), Algorithm 1, on
    records as Abadi et al. (2016), section 4, prepare them.

    Guarantee: one Gaussian mechanism on the whole data set, not amplified by any sampling. What is
    released is the upper triangle of B, the rest is its mirror image. One record more or less moves
    the upper triangle of A by that of x xᵀ, whose L2 norm is at most ‖x xᵀ‖_F = ‖x‖₂² ≤ 1: the
    multiplier is σ. It is 1 where x has a single non-zero entry, so there is nothing to gain.
    Replacing x by y moves it by at most ‖x xᵀ − y yᵀ‖_F = √(‖x‖⁴ + ‖y‖⁴ − 2 (x·y)²) ≤ √2: the
    multiplier is σ/√2. Rounding is inside the bound for up to two million records (see `rows`); the
    noise is float64, no defence against the study of its bits unless `secure_noise`. Every `fit` is
    a release of its own and is charged to `ledger` before its noise is drawn; `layer` carries that
    charge into a `DPModel`. The number of records and of features is public.

    Attributes of a fitted object:
        components_: [n_components, d], orthonormal rows, the largest entry of each positive.
        explained_variance_: [n_components], noisy eigenvalues of A, in falling order. Noise makes
            small ones too large, and may make them negative.
        explained_variance_ratio_: the same over the sum of all d, negative ones taken as 0.
        n_features_in_: d.

    Args:
        n_components: how many directions to keep, 1 to d.
        noise_multiplier: σ, the standard deviation of the noise.
        neighboring_relation: "add_or_remove" one record, as Poisson lots have it, or "replace_one",
            as fixed-size lots do.
        normalize: whether `transform` and `layer` normalise rows as `fit` does; if False they
            project raw rows. Either way a projection depends on its own record and the components
            alone.
        seed: for tests only, an integer ≥ 0 that fixes the noise; every report then says so. By
            default the noise comes from the operating system's entropy.
        allow_no_noise: allows noise_multiplier=0, which is charged ε = ∞.
        secure_noise: as for optimizers, see `tf_adadp.noise`.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> pca = dp.DPPCA(n_components=2, noise_multiplier=16.0).fit(np.eye(8))
        >>> print(pca.components_.shape, round(pca.ledger.epsilon(1e-5), 3))
        (2, 8) 0.226
    """

    def __init__(
        self,
        n_components: int,
        noise_multiplier: float,
        *,
        neighboring_relation: str = "add_or_remove",
        normalize: bool = True,
        seed: int | None = None,
        allow_no_noise: bool = False,
        secure_noise: bool = False,
    ) -> None:
        self.n_components = checks.check_integer("n_components", n_components, at_least=1)
        self.noise_multiplier = checks.check_number(
            "noise_multiplier", noise_multiplier, "a finite number above 0", at_least=0.0
        )
        self.neighboring_relation = checks.check_choice(
            "neighboring_relation", neighboring_relation, tuple(_RELATIONS)
        )
        self.normalize = checks.check_bool("normalize", normalize)
        if seed is not None:
            wanted = "an integer of at least 0 (tests only), or None for secret noise"
            seed = checks.check_integer("seed", seed, wanted, at_least=0)
        self.seed = seed
        self.allow_no_noise = checks.check_bool("allow_no_noise", allow_no_noise)
        self.secure_noise = checks.check_bool("secure_noise", secure_noise)
        if self.noise_multiplier == 0 and not allow_no_noise:
            raise ValueError(
                f"noise_multiplier={noise_multiplier!r} adds no noise. Give a number above 0, or "
                "allow_no_noise=True, which is charged as ε = ∞."
            )
        self._ledger = PrivacyLedger()

    @property
    def ledger(self) -> PrivacyLedger:
        """Returns the ledger of everything that `fit` of this object released."""
        return self._ledger

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Returns the privacy event of one `fit`, without any sampling.

        `GaussianDpEvent(σ)` for add-or-remove, `GaussianDpEvent(σ/√2)` for replace-one,
        `NonPrivateDpEvent` for σ = 0.
        """
        if self.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        return dp_accounting.GaussianDpEvent(
            self.noise_multiplier / _SENSITIVITY[self.neighboring_relation]
        )

    def charge(self, ledger: PrivacyLedger) -> None:
        """Writes one release into a ledger. `fit` does this by itself, into `self.ledger`."""
        ledger.add(
            self.event,
            neighboring_relation=_RELATIONS[self.neighboring_relation],
            origin=type(self).__name__,
            reproducible_noise=self.seed is not None,
        )

    def fit(
        self,
        x: ArrayLike | Iterable[ArrayLike],
        y: object = None,
        ledger: PrivacyLedger | None = None,
    ) -> Self:
        """Releases the components of x, and charges for it first.

        Work N·d², memory d² besides one batch.

        Args:
            x: an array [N, ...], or an iterable of batches [n, ...] that is passed over once: a
                generator, a `tf.data.Dataset`, a list of arrays. The first axis of every item is
                taken for its records, each of which comes once: items that are single records, or
                `dataset.repeat(10)`, would be released at many times the sensitivity that is
                charged.
            y: ignored.
            ledger: another `PrivacyLedger` to charge too, such as `model.ledger`. Not needed for a
                model that contains `layer()`; merging the same release again changes nothing.

        Returns:
            self.

        Raises:
            TypeError, ValueError: x has no records, no features, fewer features than n_components,
                or no numbers; batches differ in width. Nothing is charged then.
        """
        del y
        wanted = "a PrivacyLedger, such as model.ledger"
        checks.check_instance("ledger", ledger, PrivacyLedger | None, wanted)
        moment = second_moment(x)
        features = len(moment)
        if self.n_components > features:
            raise ValueError(
                f"n_components={self.n_components}: x has {features} features, give at most that."
            )
        release = self._ledger.steps
        self.charge(self._ledger)
        if ledger is not None:
            ledger.merge(self._ledger)
        # A generator for every release: copies of this object share no state to draw alike from.
        rng = np.random.default_rng(None if self.seed is None else (self.seed, release))
        noisy = add_symmetric_noise(moment, self.noise_multiplier, rng, self.secure_noise)
        values, vectors = np.linalg.eigh(noisy)
        values, vectors = values[::-1], vectors[:, ::-1].T[: self.n_components]
        largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1)[:, None], axis=1)
        self.components_ = np.where(largest < 0, -vectors, vectors)
        self.explained_variance_ = values[: self.n_components].copy()
        positive = np.maximum(values, 0.0)
        self.explained_variance_ratio_ = positive[: self.n_components] / (positive.sum() or 1.0)
        return self

    def fit_transform(
        self,
        x: ArrayLike | Iterable[ArrayLike],
        y: object = None,
        ledger: PrivacyLedger | None = None,
    ) -> np.ndarray:
        """Calls `fit(x, ledger=ledger).transform(x)`; x must be readable twice."""
        if hasattr(x, "__next__"):
            raise TypeError(
                f"x is a {type(x).__name__}, which can be read once: call fit, and then transform "
                "with a new one."
            )
        return self.fit(x, y, ledger).transform(x)

    def transform(self, x: ArrayLike | Iterable[ArrayLike]) -> np.ndarray:
        """Returns the coordinates of records along the components, [N, n_components], float64.

        Args:
            x: an array or an iterable of batches, as for `fit`.

        Raises:
            RuntimeError: before `fit`.
            TypeError, ValueError: x has another form, or another number of features.
        """
        self._check_fitted("transform")
        prepare = unit_rows if self.normalize else raw_rows
        blocks = row_blocks(x, self.n_features_in_)
        with silent():
            parts = [prepare(block) @ self.components_.T for block in blocks]
        return np.concatenate([np.empty((0, len(self.components_))), *parts])

    def inverse_transform(self, z: ArrayLike) -> np.ndarray:
        """Returns the rows [N, d] with coordinates z [N, n_components]: z · components_.

        Of the normalised records, if `normalize`; they are not put back into the records' shape.

        Raises:
            RuntimeError: before `fit`.
            ValueError: z has another shape.
        """
        self._check_fitted("inverse_transform")
        z = np.asarray(z)
        if z.ndim != 2 or z.shape[1] != len(self.components_):
            raise ValueError(f"z has shape {z.shape}: give [N, {len(self.components_)}].")
        return z @ self.components_

    def layer(self, name: str | None = None) -> PCAProjection:
        """Makes a `PCAProjection` that applies `transform` to raw inputs within a model.

        A `DPModel` that contains it reports an ε that includes the cost of its components.

        Raises:
            RuntimeError: before `fit`.
        """
        self._check_fitted("layer")
        return self._layer(PCAProjection, name)

    def whitening(self, name: str | None = None) -> ZCAWhitening:
        """Makes a `ZCAWhitening` that keeps all features and shrinks the strongest directions.

        With λ_i the noisy eigenvalues and c = max(2σ√d, λ_k), component i is scaled by
        min(1, √(c/λ_i)). 2σ√d is about the largest eigenvalue of noise alone: directions that do
        not stand out of it stay as they are, so k may be large.

        For linear models, whose training is slow along weak directions while strong ones, such as
        the mean of all records, take the steps. The cost is that of the components.

        Raises:
            RuntimeError: before `fit`.
            ValueError: there is no noise, and the last component has no variance.
        """
        self._check_fitted("whitening")
        values = self.explained_variance_
        floor = max(2.0 * self.noise_multiplier * math.sqrt(self.n_features_in_), values[-1])
        if floor <= 0:  # without noise alone
            raise ValueError(
                f"n_components={self.n_components}: the last of them has no variance. Fit fewer."
            )
        layer = self._layer(ZCAWhitening, name)
        layer.factors.assign(np.sqrt(floor / np.maximum(values, floor)))
        return layer

    def _layer(self, layer_class, name):
        layer = layer_class(
            *self.components_.shape, normalize=self.normalize, ledger=self._ledger, name=name
        )
        layer.components.assign(self.components_)
        return layer

    @property
    def n_features_in_(self) -> int:
        """Returns d, the number of features of a record."""
        if not hasattr(self, "components_"):  # as scikit-learn has it: absent before fit
            raise AttributeError("n_features_in_")
        return self.components_.shape[1]

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        return {
            "n_components": self.n_components,
            "noise_multiplier": self.noise_multiplier,
            "neighboring_relation": self.neighboring_relation,
            "normalize": self.normalize,
            "seed": self.seed,
            "allow_no_noise": self.allow_no_noise,
            "secure_noise": self.secure_noise,
        }

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Builds an object, not fitted, from the result of `get_config`."""
        return cls(**config)

    def save(self, path: str | os.PathLike) -> None:
        """Writes arguments, components, noisy eigenvalues and the ledger to an .npz file.

        Raises:
            RuntimeError: before `fit`.
        """
        self._check_fitted("save")
        arrays = {name: getattr(self, name) for name in _FITTED}
        config = json.dumps(self.get_config())
        with open(path, "wb") as file:  # np.savez would change the name
            np.savez(file, config=config, ledger=self._ledger.to_json(), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Loads the fitted object that `save` wrote, with its ledger."""
        with np.load(path, allow_pickle=False) as stored:
            pca = cls.from_config(json.loads(stored["config"].item()))
            pca._ledger = PrivacyLedger.from_json(stored["ledger"].item())
            for name in _FITTED:
                setattr(pca, name, stored[name])
        return pca

    def _check_fitted(self, method):
        if not hasattr(self, "components_"):
            raise RuntimeError(f"{method} before fit: call fit(x) first.")


def second_moment(x: ArrayLike | Iterable[ArrayLike]) -> np.ndarray:
    """Computes A = Σ x xᵀ over the normalised records, [d, d], float64; private.

    Block by block, with the rounding error of every addition kept and added at the end (Knuth's
    two-sum): so the error grows as N · BLOCK and not as N².
    """
    total = error = np.zeros(())
    with silent():
        for block in row_blocks(x):
            rows = unit_rows(block)
            product = rows.T @ rows
            new = total + product
            taken = new - total
            error = error + ((total - (new - taken)) + (product - taken))
            total = new
    if total.ndim == 0:
        raise ValueError(
            "x has no records: give at least one. (A generator can be passed over once.)"
        )
    return total + error


def add_symmetric_noise(
    matrix: np.ndarray, stddev: float, rng: np.random.Generator, secure: bool = False
) -> np.ndarray:
    """Adds N(0, stddev²) to each entry of a matrix's upper triangle, and mirrors it.

    secure: see `noise.add_gaussian`; stddev is then the noise multiplier too, at sensitivity 1.
    """
    if secure and stddev > 0:
        triangle = np.triu_indices(len(matrix))
        key = np.frombuffer(rng.bytes(16), "<i8").astype(np.int64)
        (entries,), _ = noise.add_gaussian(
            [tf.constant(matrix[triangle])], [stddev], key, 0, noise_multiplier=stddev, secure=True
        )
        upper = np.zeros_like(matrix)
        upper[triangle] = entries.numpy()
    else:
        upper = np.triu(matrix + rng.normal(0.0, stddev, matrix.shape))
    return upper + np.triu(upper, 1).T
