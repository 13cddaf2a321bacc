# %% [markdown]
# # Fine-tune a text classifier with LoRA
#
# LoRA (low-rank adaptation) freezes the weights of a network and trains small matrices beside them. That suits
# private training: every trained weight gets the same noise, and all of them share one clip norm, so with a hundredth of
# the weights the noise of a whole step is a tenth. This tutorial fine-tunes a small BERT classifier of keras_hub on raw
# strings. It downloads nothing: the text is the documentation of installed
# packages, and the task is to say whether a sentence is about statistics or about machine learning.
#
# It needs `pip install "tf_adadp[hub]"`.

# %%
import inspect
import re

import keras
import keras_hub
import numpy as np
import scipy.optimize
import scipy.signal
import scipy.stats
import sklearn.cluster
import sklearn.ensemble
import sklearn.linear_model
import sklearn.metrics
import sklearn.preprocessing
import tensorflow as tf

import tf_adadp as dp

LENGTH = 24  # tokens of a sentence


def sentences(*modules):
    """Returns the sentences in the docstrings of modules' functions and classes, each once."""
    found = {}
    for module in modules:
        for name in module.__all__ if hasattr(module, "__all__") else dir(module):
            value = getattr(module, name)
            methods = vars(value).values() if inspect.isclass(value) else []
            for documented in (value, *methods):
                text = re.sub(r"\s+", " ", str(getattr(documented, "__doc__", "")))
                for sentence in re.findall(r"[A-Z][a-z][\w ,()'-]{30,150}\.", text):
                    found.setdefault(sentence.lower())
    return list(found)


def labelled(*classes):
    """Returns shuffled sentences and the number of the class of each."""
    texts = np.array(sum(classes, []), dtype=object)
    numbers = np.repeat(np.arange(len(classes)), [len(texts) for texts in classes])
    order = np.random.default_rng(0).permutation(len(texts))
    return texts[order], numbers[order]


statistics = sentences(scipy.stats, scipy.signal, scipy.optimize)
learning = sentences(
    sklearn.linear_model,
    sklearn.ensemble,
    sklearn.metrics,
    sklearn.cluster,
    sklearn.preprocessing,
)
private_texts, private_labels = labelled(statistics, learning)
x, x_test = private_texts[:-500], private_texts[-500:]
y, y_test = private_labels[:-500], private_labels[-500:]
print(f"{len(x)} private sentences, for example:", *x[:2], sep="\n")

# %% [markdown]
# ## A public backbone
#
# In a program of yours the backbone comes from `keras_hub` with public weights:
# `keras_hub.models.TextClassifier.from_preset("bert_tiny_en_uncased", num_classes=2)`. Here a small one is trained
# on public sentences, of NumPy, Keras and TensorFlow. The vocabulary is made of public sentences too: one made of
# the private ones would tell which words occur in them.

# %%
public_texts, public_labels = labelled(
    sentences(np, np.linalg, np.ma),
    sentences(keras.layers, keras.ops),
    sentences(tf, tf.data, tf.io),
)
public_texts, public_labels = public_texts[:3500], public_labels[:3500]
words = tf.data.Dataset.from_tensor_slices(public_texts).batch(256)
vocabulary = keras_hub.tokenizers.compute_word_piece_vocabulary(
    words,
    vocabulary_size=2000,
    lowercase=True,
    reserved_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
)
tokenizer = keras_hub.models.BertTokenizer(vocabulary=vocabulary, lowercase=True)
backbone = keras_hub.models.BertBackbone(
    vocabulary_size=len(vocabulary),
    num_layers=1,
    num_heads=2,
    hidden_dim=64,
    intermediate_dim=128,
    max_sequence_length=LENGTH,
    dropout=0.0,
)


def classifier(num_classes):
    """Returns a task with a new head on the backbone. It takes strings."""
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, LENGTH)
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=num_classes, preprocessor=preprocessor
    )


loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
pretraining = classifier(3)
pretraining.compile("adam", loss, metrics=["accuracy"])
pretraining.fit(public_texts, public_labels, batch_size=64, epochs=3, verbose=0)

# %% [markdown]
# ## Adapters and a head, with privacy
#
# `enable_lora` freezes the backbone and adds adapters to its attention; the biases of adapted layers are trained too.
# The token table gets an adapter as well: the public sentences taught little about words that are rare in them. Set
# `trainable = True` before `enable_lora`, which freezes the table again and leaves the adapter. The number of trained
# weights shows whether all is as it should be. `fit` takes the raw strings. The preprocessor of the
# task makes tokens of each sentence alone and once, so a sentence influences its own tokens only.

# %%
task = classifier(2)
task.backbone.enable_lora(4)
task.backbone.token_embedding.trainable = True
task.backbone.token_embedding.enable_lora(4)
trained = sum(int(np.prod(w.shape)) for w in task.trainable_variables)
print(f"{trained:,} of {task.count_params():,} weights are trained")
model = dp.DPModel(task)
model.compile(
    dp.ADADP(),
    loss,
    metrics=["accuracy"],
    log_raw_metrics=False,
    target_epsilon=3.0,
    target_delta=1e-5,
)
model.fit(x, y, batch_size=512, epochs=7, verbose=0)

# %%
accuracy = model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
majority = max(y_test.mean(), 1 - y_test.mean())
print(f"accuracy {accuracy:.1%} at epsilon = {model.epsilon(1e-5):.2f}")
print(f"the more frequent class: {majority:.1%}")

# %% [markdown]
# ## Use it
#
# The task is a plain Keras model. It takes strings, and needs no privacy library to run.

# %%
question = np.array(["a random forest fits trees on samples of the training set."], dtype=object)
probabilities = keras.ops.softmax(task.predict(question, verbose=0))
print(f"machine learning: {float(probabilities[0, 1]):.0%}")

# %% [markdown]
# ## Save it
#
# `model.save` keeps the adapters, the optimizer's state and the ledger: a loaded model predicts the same, knows its ε,
# and can be trained further. `task.save` writes a plain Keras model for use elsewhere.

# %%
model.save("classifier.keras")
restored = dp.load_model("classifier.keras")
same = np.allclose(restored.predict(x_test, verbose=0), model.predict(x_test, verbose=0), atol=1e-4)
print(f"same predictions: {same}, epsilon = {restored.epsilon():.2f}")
