"""Raw records in fit, evaluate and predict: preprocessed once, each alone, as keras_hub's tasks do.

The model here has the form of such a task. `test_hub_tasks.py` has keras_hub's own.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tf_adadp.sampling.preprocessing import preprocessed

LENGTH, LETTERS = 8, 30
TEXTS = ["".join(np.random.default_rng(i).choice(list("abcdef"), 1 + i % 12)) for i in range(40)]
LABELS = np.array([text.count("a") > 1 for text in TEXTS], np.int32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tokens(x, length=LENGTH):
    """Numbers the letters of strings, padded or cut to `length`; None for the longest of them."""
    codes = tf.strings.unicode_decode(x, "UTF-8") % LETTERS
    return {"token_ids": codes.to_tensor(shape=[None, length])}


class Classifier(keras.Model):
    """A classifier of strings: a functional model with a preprocessor, as tasks of keras_hub."""

    def __init__(self, preprocessor):
        ids = keras.Input((LENGTH,), dtype="int32", name="token_ids")
        embedded = keras.layers.Embedding(LETTERS, 4)(ids)
        logits = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(embedded))
        super().__init__({"token_ids": ids}, logits)
        self.preprocessor = preprocessor

    def preprocess_samples(self, x, y=None, sample_weight=None):
        made = self.preprocessor(x)
        if isinstance(made, tuple):
            return made
        return keras.utils.pack_x_y_sample_weight(made, y, sample_weight)


def compiled(preprocessor=tokens):
    keras.utils.set_random_seed(5)
    model = dp.DPModel(Classifier(preprocessor))
    optimizer = dp.DPSGD(1.0, noise_multiplier=1.0, seed=3)
    model.compile(optimizer, LOSS, metrics=["accuracy"], log_raw_metrics=False)
    return model


def trained(model, *data, **arguments):
    return model.fit(*data, batch_size=10, epochs=2, verbose=0, **arguments).history


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


FORMS = {
    "list": lambda: (TEXTS, LABELS),
    "lists": lambda: (TEXTS, LABELS.tolist()),
    "unicode array": lambda: (np.array(TEXTS), LABELS),
    "object array": lambda: (np.array(TEXTS, object), LABELS),
    "tensor": lambda: (tf.constant(TEXTS), LABELS),
    "dataset": lambda: (tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)),),
    "batches": lambda: (tf.data.Dataset.from_tensor_slices((TEXTS, LABELS)).batch(16),),
}


@pytest.fixture(scope="module")
def by_hand():
    """Weights and logs of training on arrays that were preprocessed beforehand."""
    model = compiled(preprocessor=None)
    x = {"token_ids": tokens(TEXTS)["token_ids"].numpy()}
    history = trained(model, x, LABELS, validation_data=(x, LABELS))
    return model.get_weights(), history, model.predict(x, verbose=0)


@pytest.mark.representative(1, 5)
@pytest.mark.parametrize("form", FORMS)
def test_raw_records_train_like_preprocessed_ones(by_hand, form):
    weights, history, predicted = by_hand
    model = compiled()
    logs = trained(model, *FORMS[form](), validation_data=(TEXTS, LABELS))
    assert equal(model.get_weights(), weights)
    assert logs == history
    assert np.array_equal(model.predict(TEXTS, verbose=0), predicted)


def test_evaluation_takes_raw_records(by_hand):
    _, history, predicted = by_hand
    model = compiled()
    trained(model, TEXTS, LABELS)
    expected = pytest.approx([history["val_loss"][-1], history["val_accuracy"][-1]], rel=1e-6)
    batches = tf.data.Dataset.from_tensor_slices((np.array(TEXTS), LABELS)).batch(7)
    assert model.evaluate(TEXTS, LABELS, verbose=0) == expected
    assert model.evaluate(batches, verbose=0) == expected
    assert model.test_on_batch(TEXTS, LABELS) == expected
    assert np.allclose(model.predict(batches, verbose=0), predicted)
    assert np.allclose(model.predict_on_batch(TEXTS), predicted)


def test_validation_data_may_be_a_dataset_or_a_part(by_hand):
    model = compiled()
    batches = tf.data.Dataset.from_tensor_slices((np.array(TEXTS), LABELS)).batch(40)
    logs = trained(model, TEXTS, LABELS, validation_data=batches)
    assert logs["val_loss"] == pytest.approx(by_hand[1]["val_loss"], rel=1e-6)

    model = compiled()
    trained(model, TEXTS, LABELS, validation_split=0.25)
    assert model.step_law.num_examples == 30


def test_one_private_step_takes_raw_records():
    model = compiled()
    before = model.get_weights()
    law = dp.accounting.PoissonSampling(len(TEXTS), 10)
    model.train_on_batch(TEXTS[:9], LABELS[:9], law=law)
    assert not equal(model.get_weights(), before)
    assert model.ledger.steps == 1


def test_each_record_is_preprocessed_once_and_alone():
    seen = []

    def look(x):
        seen.append(x.tolist())
        return x

    def preprocessor(x):
        return tokens(tf.ensure_shape(tf.numpy_function(look, [x], tf.string), [None]))

    model = compiled(preprocessor)
    model.fit(TEXTS, LABELS, batch_size=10, epochs=3, verbose=0)
    assert sorted(seen) == sorted([text.encode()] for text in TEXTS)


def test_no_record_decides_about_the_tensors_of_another():
    """A preprocessor that centres its batch finds batches of one."""

    def centred(x):
        return {"x": x - tf.reduce_mean(x, 0, keepdims=True), "rank": tf.range(tf.shape(x)[0])}

    model = Classifier(centred)
    x, _, _ = preprocessed(model, np.arange(12.0).reshape(6, 2))
    assert x["x"].shape == (6, 2)
    assert not x["x"].any()
    assert not x["rank"].any()


def test_labels_and_weights_may_come_from_the_preprocessor():
    """Returns the next tokens, and weights of 0 for padding, as for language models."""

    def shifted(x):
        ids = tokens(x, LENGTH + 1)["token_ids"]
        return {"token_ids": ids[:, :-1]}, ids[:, 1:], ids[:, 1:] != 0

    x, y, weight = preprocessed(Classifier(shifted), TEXTS)
    ids = tokens(TEXTS, LENGTH + 1)["token_ids"].numpy()
    assert np.array_equal(x["token_ids"], ids[:, :-1])
    assert np.array_equal(y, ids[:, 1:])
    assert np.array_equal(weight, ids[:, 1:] != 0)


def test_weights_of_records_are_kept():
    weight = np.arange(len(TEXTS), dtype=np.float32)
    pairs = (np.array(TEXTS), np.array(TEXTS[::-1]))  # two strings a record
    model = Classifier(lambda x: {"token_ids": tokens(x[0] + x[1])["token_ids"]})
    x, y, sample_weight = preprocessed(model, pairs, LABELS, weight)
    joined = [a + b for a, b in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert np.array_equal(x["token_ids"], tokens(joined)["token_ids"])
    assert np.array_equal(y, LABELS)
    assert np.array_equal(sample_weight, weight)


def random_mask(x):
    ids = tokens(x)["token_ids"]
    return {"token_ids": tf.where(tf.random.uniform(tf.shape(ids)) < 0.5, ids, 0)}


def counting():
    count = tf.Variable(0)
    return lambda x: {"token_ids": tokens(x)["token_ids"] * 0 + count.assign_add(1)}


def with_table():
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)

    def preprocessor(x):
        table.insert(x, tf.ones_like(x, tf.int64))
        return tokens(x)

    return preprocessor


REFUSED = {
    "two rows of one record": (
        lambda x: {"token_ids": tf.repeat(tokens(x)["token_ids"], 2, 0)},
        r"gives 2 rows in x\['token_ids'\] for one record.*no packing",
    ),
    "one row for all": (
        lambda x: {"token_ids": tokens(x)["token_ids"][0, 0]},
        r"gives no row in x\['token_ids'\] for one record",
    ),
    "no row for short records": (
        lambda x: {"token_ids": tf.boolean_mask(tokens(x)["token_ids"], tf.strings.length(x) > 3)},
        r"unequal shapes for different records",
    ),
    "padding to the longest": (
        lambda x: tokens(x, length=None),
        r"unequal shapes for different records.*sequence_length=128",
    ),
    "ragged": (
        lambda x: {"token_ids": tf.strings.unicode_decode(x, "UTF-8")},
        r"gives x\['token_ids'\] as a Ragged.*sequence_length=128",
    ),
    "random numbers": (random_mask, r"draws random numbers \(RandomUniform\).*layers into the mod"),
    "state": (counting(), r"keeps state from one record to the next \(AssignAddVariableOp\)"),
    "a table": (with_table(), r"keeps state from one record to the next \(LookupTableInsertV2\)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_preprocessing_that_is_not_of_one_record_is_refused(kind):
    preprocessor, message = REFUSED[kind]
    model = compiled(preprocessor)
    with pytest.raises(ValueError, match=rf"(?s)The preprocessing of Classifier.*{message}"):
        trained(model, TEXTS, LABELS)
    assert model.ledger.steps == 0


def test_data_that_are_not_raw_are_refused():
    model = compiled()
    ids = tokens(TEXTS)
    with pytest.raises(ValueError, match=r"cannot take x\['token_ids'\].*`preprocessor = None`"):
        trained(model, ids, LABELS)
    lots = dp.PoissonLots(np.array(TEXTS, object), LABELS, expected_size=10)
    with pytest.raises(ValueError, match=r"lots hold strings.*task\.preprocessor\(x\)"):
        model.fit(lots, verbose=0)
    with pytest.raises(TypeError, match="list_iterator, and Classifier preprocesses its records"):
        model.predict(iter([TEXTS]), verbose=0)
    with pytest.raises(ValueError, match="x has no rows"):
        model.predict([], verbose=0)
    lots = dp.PoissonLots({"token_ids": ids["token_ids"]}, LABELS, expected_size=10)
    model.fit(lots, verbose=0)


def scaled(x):
    return tf.image.resize(tf.cast(x, tf.float32) / 255.0, (2, 2))


class ImageClassifier(keras.Model):
    """A classifier of images in 0 to 255, which its preprocessor scales."""

    def __init__(self):
        inputs = keras.Input((2, 2, 3))
        super().__init__(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(inputs)))
        self.preprocessor = scaled

    preprocess_samples = Classifier.preprocess_samples


IMAGES = np.random.default_rng(0).integers(0, 256, (40, 2, 2, 3)).astype(np.uint8)
MAKERS = {
    "poisson": lambda x: dp.PoissonLots(x, LABELS, expected_size=10),
    "users": lambda x: dp.UserLots(
        x, LABELS, user_ids=np.arange(40) // 2, expected_users=5, max_records_per_user=2,
        expected_size=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("maker", MAKERS)
def test_lots_of_raw_images_are_refused(maker):
    """They would be trained on unscaled, without an error."""
    task = ImageClassifier()
    model = dp.DPModel(task)
    model.compile(dp.DPSGD(1.0, noise_multiplier=1.0), LOSS, log_raw_metrics=False)
    with pytest.raises(ValueError, match="lots hold x uint8.*ImageClassifier would preprocess"):
        model.fit(MAKERS[maker](IMAGES), verbose=0)
    assert model.ledger.steps == 0
    task.preprocessor = None
    model.fit(MAKERS[maker](scaled(IMAGES).numpy()), verbose=0)
    assert model.ledger.steps == 4


def test_a_step_on_a_lot_of_raw_images_is_refused():
    task, ledger = ImageClassifier(), dp.PrivacyLedger()
    optimizer = dp.DPSGD(1.0, noise_multiplier=1.0)
    for step, x in enumerate((IMAGES, scaled(IMAGES).numpy())):
        lots = dp.PoissonLots(x, LABELS, expected_size=10)
        (lot,) = lots.take(1, physical_batch_size=8)
        arguments = {"ledger": ledger, "law": lots.law}
        if step == 0:
            with pytest.raises(ValueError, match="lots hold x uint8"):
                dp.private_step(task, LOSS, lot, optimizer, **arguments)
            assert ledger.steps == 0
            task.preprocessor = None
    dp.private_step(task, LOSS, lot, optimizer, **arguments)
    assert ledger.steps == 1


def test_a_preprocessor_may_be_taken_off_after_training(by_hand):
    task = compiled().model
    model = dp.DPModel(task)
    model.compile(dp.DPSGD(1.0, noise_multiplier=1.0), LOSS, log_raw_metrics=False)
    trained(model, TEXTS, LABELS)
    expected = model.predict(TEXTS, verbose=0)
    task.preprocessor = None
    x = {"token_ids": tokens(TEXTS)["token_ids"].numpy()}
    assert np.array_equal(model.predict(x, verbose=0), expected)
    with pytest.raises(ValueError, match="preprocessor=None, and had .* Compile again"):
        trained(model, x, LABELS)
    model.compile(dp.DPSGD(1.0, noise_multiplier=1.0), LOSS, log_raw_metrics=False)
    trained(model, x, LABELS)
    assert model.ledger.steps == 16


def test_make_compatible_does_not_drop_a_preprocessor():
    task = ImageClassifier()
    with pytest.raises(ValueError, match="ImageClassifier with a preprocessor.*preprocessor = N"):
        dp.make_compatible(task)
    task.preprocessor = None
    assert dp.make_compatible(task).count_params() == task.count_params()


@pytest.mark.extended
def test_datasets_are_preprocessed_by_record_as_arrays_are():
    """A preprocessor that centres a batch gets single records in evaluation too."""

    def centred(x):
        x = tf.cast(x, tf.float32)
        return x - tf.reduce_mean(x, 0, keepdims=True) + x / 255.0

    task = ImageClassifier()
    task.preprocessor = centred
    model = dp.DPModel(task)
    model.compile(dp.DPSGD(1.0, noise_multiplier=1.0), LOSS, log_raw_metrics=False)
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(16)
    expected = model.predict(IMAGES, verbose=0)
    assert np.allclose(model.predict(dataset, verbose=0), expected, atol=1e-6)
    loss = model.evaluate(IMAGES, LABELS, verbose=0)
    assert model.evaluate(dataset, verbose=0) == pytest.approx(loss, rel=1e-5)
    logs = model.fit(IMAGES, LABELS, batch_size=10, validation_data=dataset, verbose=0).history
    assert logs["val_loss"][-1] == pytest.approx(model.evaluate(IMAGES, LABELS, verbose=0), 1e-5)
    with pytest.raises(ValueError, match="batch it"):
        model.evaluate(tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)), verbose=0)


def unknown_rank(x):
    made = tf.numpy_function(lambda x: np.zeros(len(x), np.int32), [x], tf.int32)
    shape = tf.numpy_function(lambda: np.zeros(0, np.int64), [], tf.int64)
    return {"token_ids": tf.reshape(made, shape)}


def stops(x):
    codes = tokens(x)["token_ids"]
    with tf.control_dependencies(
        [tf.debugging.assert_none_equal(x, [TEXTS[23]], message="a bad record")]
    ):
        return {"token_ids": tf.identity(codes)}


def raises(x):
    raise KeyError("no such token")


class Raising(keras.layers.Layer):
    def call(self, x):
        raise ValueError("not for me")


UNCLEAR = {
    "nothing": (lambda x: None, TEXTS, r"gives no tensor for x, but None.*Return x"),
    "an empty dict": (lambda x: {}, TEXTS, r"gives no tensor for x, but \{\}.*Return x"),
    "a result of unknown rank": (unknown_rank, TEXTS, r"gives no row in x\['token_ids'\]"),
    "a record that fails": (stops, TEXTS, r"stops at record 23: .*a bad record.*Clean the rec"),
    "an error while tracing": (
        raises,
        TEXTS,
        r"cannot take x string.*\): KeyError: 'no such token'",
    ),
    "an error of a layer": (Raising(), TEXTS, r"calling Raising.call\(\)\. not for me\. Give raw"),
    "rows of unequal lengths": (tokens, [[1, 2], [3]], "x is a list of 2 rows of unequal lengths"),
    "one string": (tokens, "a text", r"x is one string, 'a text': .*\['a text'\]"),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_errors_name_what_is_wrong(kind):
    preprocessor, x, message = UNCLEAR[kind]
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}"):
        preprocessed(Classifier(preprocessor), x, LABELS[: len(x)])


@pytest.mark.parametrize("make", [np.array, list, tf.constant])
def test_a_list_of_arrays_without_labels_is_refused(make):
    x = [make(TEXTS[:3]), make(TEXTS[3:6])]
    with pytest.raises(ValueError, match=r"x is a list of 2 arrays without y.*tuple\(x\)"):
        compiled().predict(x, verbose=0)


def test_other_data_than_arrays_are_refused():
    class Batches(keras.utils.PyDataset):
        num_batches = 1

        def __getitem__(self, index):
            return np.array(TEXTS), LABELS

    with pytest.raises(TypeError, match="x is a Batches, .*lists of strings"):
        trained(compiled(), Batches())


def test_records_that_do_not_fit_into_memory(monkeypatch):
    monkeypatch.setattr("tf_adadp.sampling.datasets.columns.memory_limit", lambda: 100)
    with pytest.raises(ValueError, match="may keep 100 in memory. Preprocess them in parts"):
        preprocessed(Classifier(tokens), TEXTS)


def test_validate_takes_raw_records():
    model = Classifier(tokens)
    assert dp.validate(model, LOSS, TEXTS, LABELS).ok
    assert dp.validate(model, LOSS, *FORMS["dataset"]()).ok


def test_long_work_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr("tf_adadp.sampling.preprocessing._SILENT_SECONDS", 0.0)
    preprocessed(Classifier(tokens), TEXTS)
    assert f"{len(TEXTS)}/{len(TEXTS)}" in capsys.readouterr().out
    preprocessed(Classifier(tokens), TEXTS, verbose=False)
    assert not capsys.readouterr().out
