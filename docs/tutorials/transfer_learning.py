# %% [markdown]
# # Fine-tune the head of a frozen network
#
# Noise is added to every trained weight, so fewer trained weights mean less noise in total. The usual way to
# good private accuracy is to take a network that was trained on public data, to freeze it, and to train a new
# head on the private records. In this tutorial 797 digits stand for a public archive, with the digit as label.
# 1,000 others are private, and have another label: odd or even.

# %%
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_adadp as dp

images, labels = load_digits(return_X_y=True)
images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
public_x, private_x, public_y, private_y = train_test_split(
    images, labels, test_size=1000, random_state=0, stratify=labels
)
x, x_test, y, y_test = train_test_split(private_x, private_y % 2, test_size=200, random_state=0)
print(f"{len(public_x)} public records, {len(x)} private ones")

# %% [markdown]
# ## Train the backbone on public data
#
# In a program of yours this is a network of `keras.applications` or `keras_hub` with public weights. Its
# training needs no privacy.

# %%
keras.utils.set_random_seed(0)


def convolutional():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="tanh"),
        ]
    )


backbone = convolutional()
pretraining = keras.Sequential([backbone, keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
pretraining.compile("adam", loss, metrics=["accuracy"])
pretraining.fit(public_x, public_y, batch_size=32, epochs=10, verbose=0)

# %% [markdown]
# ## Train a new head with privacy
#
# `trainable = False` freezes the backbone: its weights get neither gradient nor noise.
# `dp.validate` says whether anything in the model stands in the way of private training.

# %%
backbone.trainable = False
classifier = keras.Sequential([backbone, keras.layers.Dense(2)])
print(dp.validate(classifier))

# %%
settings = {"loss": loss, "metrics": ["accuracy"], "log_raw_metrics": False}
budget = {"target_epsilon": 0.5, "target_delta": 1e-5}


def train(model, inputs, test_inputs):
    """Returns the test accuracy after private training at ε = 0.5."""
    private = dp.DPModel(model)
    private.compile(dp.ADADP(), **settings, **budget)
    private.fit(inputs, y, batch_size=128, epochs=20, verbose=0)
    accuracy = private.evaluate(test_inputs, y_test, verbose=0, return_dict=True)["accuracy"]
    trained = sum(int(np.prod(w.shape)) for w in model.trainable_variables)
    print(f"{trained} trained weights: {accuracy:.1%} at epsilon = {private.epsilon(1e-5):.2f}")
    return accuracy


head_accuracy = train(classifier, x, x_test)

# %% [markdown]
# The same network with all weights trained from scratch has more to learn and gets more noise:

# %%
scratch = keras.Sequential([convolutional(), keras.layers.Dense(2)])
scratch_accuracy = train(scratch, x, x_test)

# %% [markdown]
# ## Compute the features once
#
# The frozen backbone gives the same features for a record in every epoch. Compute them once, and train the
# head on them: the guarantee is the same, as the features of a record depend on that record alone, and a step
# takes a fraction of the time.

# %%
features = backbone.predict(x, verbose=0)
test_features = backbone.predict(x_test, verbose=0)
head = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2)])
feature_accuracy = train(head, features, test_features)

# %% [markdown]
# Two things to mind:
#
# - The backbone must be public. If it saw the private records, its training belongs into the same ledger.
# - A backbone with `BatchNormalization` is fine while it is frozen, since it then uses its stored statistics.
#   To train it, see `dp.make_compatible`.
