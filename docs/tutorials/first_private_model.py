# %% [markdown]
# # Train your first private model
#
# This tutorial trains a classifier of handwritten digits with differential privacy, reads its guarantee, and
# shows what privacy costs. It takes half a minute on a laptop, and downloads nothing.
#
# Differential privacy (DP) limits what anybody can learn about one training record from the trained model.
# The limit is a number, ε: the smaller it is, the stronger the guarantee. A second number, δ, is a small
# probability on top of it, well below one over the number of records.

# %%
import keras
import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_adadp as dp

images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(
    images / 16, labels, test_size=360, random_state=0, stratify=labels
)
print(f"{len(x)} training records, {len(x_test)} test records, {x.shape[1]} pixels")

# %% [markdown]
# The pixels are divided by 16, their known maximum. Never scale private data by a mean or a maximum that you
# computed from them: these numbers are statistics of the records, and no ε would cover them.
#
# ## Wrap a Keras model
#
# `DPModel` wraps any Keras model. `compile` takes a private optimizer and a budget, and `fit` finds the noise
# that keeps the whole training within it.


# %%
def network():
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


model = dp.DPModel(network())
model.compile(
    optimizer=dp.ADADP(),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    log_raw_metrics=False,
    target_epsilon=2.0,
    target_delta=1e-5,
)
history = model.fit(
    x,
    y,
    batch_size=256,
    epochs=30,
    validation_data=(x_test, y_test),
    callbacks=[dp.PrivacyCallback(target_delta=1e-5)],
    verbose=0,
)

# %% [markdown]
# Three things differ from ordinary training:
#
# - **`batch_size` is an expected size.** In every step each record enters the batch with probability 256/1437,
#   independently of the others. Such a random batch is called a *lot*. The accounting assumes this sampling,
#   so `fit` does it.
# - **The gradient is clipped per record, and noise is added to the sum.** That is what makes a step private.
# - **`log_raw_metrics=False`** leaves training loss and accuracy out of the logs, as they are statistics of
#   the private records without any noise. Validation metrics are computed on other records.
#
# ## Look at accuracy and ε
#
# `PrivacyCallback` puts ε into the logs, after every epoch.

# %%
figure, left = plt.subplots(figsize=(7, 3.5), layout="constrained")
left.plot(history.history["epsilon"], history.history["val_accuracy"], "o-")
left.set_xlabel("ε at δ = 1e-5")
left.set_ylabel("test accuracy")
left.grid(alpha=0.3)

# %% [markdown]
# ## Compare with training without privacy

# %%
plain = network()
plain.compile("rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"])
plain.fit(x, y, batch_size=32, epochs=30, verbose=0)
private_accuracy = history.history["val_accuracy"][-1]
plain_accuracy = plain.evaluate(x_test, y_test, verbose=0)[1]
print(f"private: {private_accuracy:.1%} at epsilon = {model.epsilon(1e-5):.2f}")
print(f"without privacy: {plain_accuracy:.1%}")

# %% [markdown]
# With 1,437 records the difference is some points. It shrinks as the number of records grows, because the
# noise stays and the sum of gradients grows.
#
# ## Read the statement
#
# The ledger of the model holds every release. Its statement is what you hand to a data-protection officer.

# %%
print(model.ledger.statement(delta=1e-5))

# %% [markdown]
# ## Save the model
#
# `model.model` is the plain Keras model. It loads without this library, and its file has no ledger. To continue private
# training later, save the `DPModel` itself: its file holds the ledger, so the loaded model counts what was spent.

# %%
model.model.save("digits.keras")
model.save("digits_with_ledger.keras")
restored = dp.load_model("digits_with_ledger.keras")
print(f"epsilon of the restored model: {restored.epsilon(1e-5):.2f}")
