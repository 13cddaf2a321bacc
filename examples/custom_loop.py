"""Trains privately with a loop of one's own: lots, a ledger and private steps.

    python examples/custom_loop.py

What `DPModel.fit` does, spelled out. One call of `private_step` charges the ledger, clips the
gradients of every example, releases their noisy sum and updates the weights. `plan_steps` tells the
optimizer when its rate has to end.
"""

import datasets
import keras

import tf_adadp as dp

EXPECTED_LOT_SIZE = 128
NOISE_MULTIPLIER = 4.0
DELTA = 1e-5
PHYSICAL_BATCH_SIZE = 64


def train(data, epochs=40):
    """Trains a small network with ADADP.

    Returns:
        The plain Keras model and the ledger of what was spent.
    """
    model = keras.Sequential(
        [
            keras.Input(data.x_train.shape[1:]),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="tanh"),
            keras.layers.Dense(data.num_classes),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = dp.ADADP(noise_multiplier=NOISE_MULTIPLIER)
    lots = dp.PoissonLots(data.x_train, data.y_train, expected_size=EXPECTED_LOT_SIZE)
    ledger = dp.PrivacyLedger()
    optimizer.build(model.trainable_variables)
    optimizer.plan_steps(epochs * lots.steps_per_epoch)
    # Every iteration over the stream draws new lots. Each serves one step: a second release from a
    # lot would cost more than one from a lot of its own.
    stream = lots.as_dataset(PHYSICAL_BATCH_SIZE, num_lots=lots.steps_per_epoch)
    for epoch in range(epochs):
        for lot in stream:
            dp.private_step(model, loss, lot, optimizer, ledger=ledger, law=lots.law)
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: ε = {ledger.epsilon(DELTA):.3f} at δ = {DELTA:g}")
    return model, ledger


def main():
    keras.utils.set_random_seed(0)  # initial weights; lots and noise have their own, secret keys
    data = datasets.load("digits")
    model, ledger = train(data)
    predicted = model.predict(data.x_test, verbose=0).argmax(-1)
    accuracy = (predicted == data.y_test).mean()
    print(f"test accuracy {accuracy:.3f}, ε = {ledger.epsilon(DELTA):.3f} at δ = {DELTA:g}")


if __name__ == "__main__":
    main()
