"""Private training with a loop of one's own: lots, ledger, clipped sum, release.

    python examples/custom_loop.py

What `DPModel.fit` does, spelled out. The order matters: a step is charged before it is taken.
"""

import datasets
import keras
import tensorflow as tf

import tf_adadp as dp

EXPECTED_LOT_SIZE = 128
NOISE_MULTIPLIER = 4.0
DELTA = 1e-5
PHYSICAL_BATCH_SIZE = 64


def train(data, epochs=40):
    """Trains a small network with ADADP.

    Returns:
        The plain Keras model, the ledger of what was spent, and the compiled step function.
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
    optimizer.build(model.trainable_variables)

    lots = dp.PoissonLots(data.x_train, data.y_train, expected_size=EXPECTED_LOT_SIZE)
    ledger = dp.PrivacyLedger()
    stream = lots.as_dataset(PHYSICAL_BATCH_SIZE, num_lots=lots.steps_per_epoch)

    # Lots differ in their number of physical batches. The signature of the stream leaves that
    # number open, so one graph serves them all.
    @tf.function(input_signature=[stream.element_spec], autograph=False)
    def private_step(lot):
        # The sum is raw: it goes into apply_private and nowhere else. Dividing by the EXPECTED
        # size keeps the realised one private.
        sums = dp.clipped_sum(model, loss, lot, optimizer)
        optimizer.apply_private(sums, lots.expected_size)

    for epoch in range(epochs):
        for lot in stream:
            optimizer.charge(ledger, lots.law)
            private_step(lot)
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: ε = {ledger.epsilon(DELTA):.3f} at δ = {DELTA:g}")
    return model, ledger, private_step


def main():
    keras.utils.set_random_seed(0)  # initial weights; lots and noise have their own, secret keys
    data = datasets.load("digits")
    model, ledger, _ = train(data)
    predicted = model.predict(data.x_test, verbose=0).argmax(-1)
    accuracy = (predicted == data.y_test).mean()
    print(f"test accuracy {accuracy:.3f}, ε = {ledger.epsilon(DELTA):.3f} at δ = {DELTA:g}")


if __name__ == "__main__":
    main()
