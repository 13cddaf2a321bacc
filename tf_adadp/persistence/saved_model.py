"""Saves, loads and sets the weights of a DPModel together with their ledger."""

from typing import Any

import numpy as np

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.persistence import files
from tf_adadp.persistence.model_ledger import LedgerState, ModelLedger
from tf_adadp.persistence.trained_parts import Adapters
from tf_adadp.utils.keras_compat import layers_of


class SavedWithLedger:
    """Mixin of a Keras model: saves and loads the ledger of its weights along with them."""

    def _keep_ledger(self, ledger: PrivacyLedger | None) -> None:
        """Begins to keep the ledger, once the plain model is `self.model`."""
        self._history = ModelLedger(self, ledger)
        self._ledger_state = LedgerState(self._history)  # under this name in checkpoints
        # Keras loads private attributes after others.
        self._trained_adapters = Adapters(lambda: layers_of(self.model))

    @property
    def ledger(self) -> PrivacyLedger:
        """Returns the `PrivacyLedger` of everything that was released about these weights.

        One ledger for all DPModels that have a privately trained variable in common, frozen or not.
        """
        return self._history.current()

    def epsilon(self, delta: float | None = None, accountant: str | None = None) -> float:
        """Returns ε of everything released so far; see `PrivacyLedger.epsilon`.

        Args:
            delta: δ in (0, 1); None for the `target_delta` of `compile`.
            accountant: one of `accounting.ACCOUNTANTS`; None for "rdp", or without a `delta` for
                the one of `compile`.

        Raises:
            ValueError: a release was not charged; its sampling law or the history of the weights is
                unknown; delta is None and `compile` had no budget.
        """
        return self._history.epsilon(delta, accountant)

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """Sets the weights; outside of `fit`, their history is unknown from then on.

        Callbacks that go back to earlier weights of the same run are fine. Public weights belong
        into the plain model: `model.model.set_weights(weights)`.
        """
        self._history.note_replaced(
            "set_weights was called on the DPModel, so what its weights cost is unknown. Put "
            "public weights into the plain model, `model.model.set_weights`"
        )
        super().set_weights(weights)

    def set_state_tree(self, state_tree: dict[str, Any]) -> None:
        """Sets all state as Keras does; of the weights the history is unknown from then on."""
        self._history.note_replaced(
            "set_state_tree was called on the DPModel (Orbax checkpoints do): the tree has no "
            "ledger, so what its weights cost is unknown. Use `save` and `load_model`, or "
            "`save_weights` and `load_weights`"
        )
        super().set_state_tree(state_tree)

    def save(
        self, filepath: Any, overwrite: bool = True, zipped: bool | None = None, **kwargs: Any
    ) -> None:
        """Saves as Keras does; a local file is replaced whole, see `tf_adadp.persistence.files`.

        Raises:
            ValueError: for Keras's legacy format, a single .h5 file, which cannot hold the ledger.
        """
        files.refuse_legacy_format(filepath)
        with files.whole_file(filepath, overwrite, zipped is not False) as path:
            super().save(path, overwrite=overwrite, zipped=zipped, **kwargs)

    def save_weights(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves weights, optimizer state and ledger as Keras does; a local file is replaced whole.

        So `ModelCheckpoint` and `BackupAndRestore` leave the last file or the new one, and no half
        one, wherever they are killed.
        """
        single = kwargs.get("max_shard_size") is None  # an argument of newer Keras
        with files.whole_file(filepath, overwrite, single) as path:
            super().save_weights(path, overwrite=overwrite, **kwargs)

    def load_weights(self, filepath: Any, **kwargs: Any) -> None:
        """Loads weights with their ledger; without one, `epsilon` refuses from then on.

        Raises:
            OSError: the file is missing or damaged. Nothing was loaded, or changed, then.
            ValueError: the file is about other weights, or another optimizer, than this model's.
        """
        files.check_whole(filepath)
        if self.compiled and self.model.built and not self.optimizer.built:
            with self.distribute_strategy.scope():
                self.optimizer.build(self.trainable_variables)  # or its state would be passed by
        with self._history.loading(filepath):
            super().load_weights(filepath, **kwargs)

    def save_own_variables(self, store: Any) -> None:
        """Writes the ledger with the weights."""
        super().save_own_variables(store)
        self._history.save_to(store)

    def load_own_variables(self, store: Any) -> None:
        """Merges the stored ledger into this one; weights of unknown history fail closed."""
        self._history.load_from(store)
