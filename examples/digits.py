"""Trains a classifier of digits with differential privacy: the program of the README."""

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_adadp as dp

images, labels = load_digits(return_X_y=True)  # 1,797 images of 8 × 8 pixels
x, x_test, y, y_test = train_test_split(images / 16, labels, test_size=360, random_state=0)
layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
model = dp.DPModel(keras.Sequential(layers))
loss, budget = "sparse_categorical_crossentropy", {"target_epsilon": 2.0, "target_delta": 1e-5}
model.compile(dp.ADADP(), loss, metrics=["accuracy"], log_raw_metrics=False, **budget)
model.fit(x, y, batch_size=256, epochs=30, validation_data=(x_test, y_test), verbose=2)
print(f"epsilon = {model.epsilon(1e-5):.3f}")
model.model.save("digits.keras")  # a plain Keras model, loads without tf_adadp
