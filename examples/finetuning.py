"""Serves the fine-tuning examples: trains a keras_hub task privately and sums it up."""

import time

import tf_adadp as dp  # loads TensorFlow when a name of it is first used


def fine_tune(task, private, test, *, epsilon, delta, epochs, lot_size, started):
    """Trains what is trainable of a task on private records, and evaluates it.

    Args:
        task: a classifier of keras_hub that takes raw records.
        private, test: records and labels.
        epsilon, delta: the budget of the training.
        epochs, lot_size: private epochs, and the expected lot size.
        started: `time.perf_counter()` at the beginning of the program.

    Returns:
        The summary for the last line on stdout.
    """
    import keras
    import numpy as np

    records, labels = private
    model = dp.DPModel(task)
    model.compile(
        optimizer=dp.ADADP(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        log_raw_metrics=False,
        target_epsilon=epsilon,
        target_delta=delta,
    )
    model.fit(
        records,
        labels,
        batch_size=lot_size,
        epochs=epochs,
        callbacks=[dp.PrivacyCallback(delta)],
        verbose=2,
    )
    # For the reader: nothing is chosen by it, and no ε covers the test records.
    _, accuracy = model.evaluate(*test, verbose=0)
    return {
        "private_records": len(records),
        "trained_weights": sum(int(np.prod(w.shape)) for w in task.trainable_weights),
        "all_weights": task.count_params(),
        "accuracy": accuracy,
        "majority_baseline": float(np.bincount(test[1]).max() / len(test[1])),
        "epsilon": model.epsilon(delta),
        "delta": delta,
        "noise_multiplier": model.optimizer.noise_multiplier,
        "lot_size": lot_size,
        "steps": model.ledger.steps,
        "engine": model.gradient_plan().engine,
        "seconds": round(time.perf_counter() - started, 1),
    }
