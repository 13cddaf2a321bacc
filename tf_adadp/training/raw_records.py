"""Preprocesses the raw records that a model is evaluated on, by the model's own preprocessing."""

from typing import Any

import keras
import tensorflow as tf

from tf_adadp.sampling import Lots
from tf_adadp.sampling.preprocessing import preprocessed, preprocessed_batches, preprocesses
from tf_adadp.utils.keras_compat import evaluates_for_fit


class TakesRawRecords:
    """Mixin of a model around `self.model`: evaluates it on records as its task takes them."""

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Evaluates as Keras does, without privacy; a task of keras_hub takes raw records."""
        if not evaluates_for_fit(kwargs):  # whose validation data are prepared
            x, y, sample_weight = evaluated(self.model, x, y, sample_weight, bool(verbose))
        return super().evaluate(
            x,
            y,
            batch_size=batch_size,
            verbose=verbose,
            sample_weight=sample_weight,
            steps=steps,
            callbacks=callbacks,
            return_dict=return_dict,
            **kwargs,
        )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Predicts as Keras does, without privacy; a task of keras_hub takes raw records."""
        x, _, _ = evaluated(self.model, x, verbose=bool(verbose))
        return super().predict(
            x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks
        )

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, **kwargs: Any) -> Any:
        """Evaluates one batch as Keras does; a task of keras_hub takes raw records."""
        return super().test_on_batch(*preprocessed(self.model, x, y, sample_weight), **kwargs)

    def predict_on_batch(self, x: Any) -> Any:
        """Predicts one batch as Keras does; a task of keras_hub takes raw records."""
        return super().predict_on_batch(preprocessed(self.model, x)[0])


def evaluated(
    model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None, verbose: bool = True
) -> tuple[Any, Any, Any]:
    """Preprocesses data for evaluation: arrays, or a dataset of batches.

    Args:
        model: the plain model. One that does not preprocess gets its data back.
        x, y, sample_weight: as for `keras.Model.evaluate`.
        verbose: whether to show a progress bar where it takes long.

    Raises:
        TypeError, ValueError: as `preprocessed`; a generator or another loader.
    """
    if not preprocesses(model):
        return x, y, sample_weight
    if isinstance(x, tf.data.Dataset):
        return preprocessed_batches(model, x), y, sample_weight
    if isinstance(x, keras.utils.PyDataset) or hasattr(x, "__next__"):
        raise TypeError(
            f"x is a {type(x).__name__}, and {type(model).__name__} preprocesses its records: give "
            "arrays, lists of strings, or a tf.data.Dataset of batches."
        )
    return preprocessed(model, x, y, sample_weight, verbose)


def validated(model: keras.Model, data: Any, verbose: bool) -> Any:
    """Preprocesses the `validation_data` of `fit`; forms that `fit` refuses stay as they are."""
    if data is None or isinstance(data, Lots) or not preprocesses(model):
        return data
    if isinstance(data, (tuple, list)):
        if len(data) not in (1, 2, 3):
            return data
        return evaluated(model, *data, verbose=verbose)
    return evaluated(model, data, verbose=verbose)[0]
