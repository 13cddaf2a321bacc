"""Tasks of keras_hub, given raw strings and images."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp

hub = pytest.importorskip("keras_hub", reason="keras_hub comes with the extra tf_adadp[hub]")
pytestmark = pytest.mark.extended  # the extra is there in the second run

LETTERS = list("abcdefghijklmnop")
TEXTS = [" ".join(np.random.default_rng(i).choice(LETTERS, 3 + i % 9)) for i in range(30)]
LABELS = np.arange(30, dtype=np.int32) % 3
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
IMAGES = np.random.default_rng(0).integers(0, 256, (30, 6, 6, 3)).astype(np.uint8)
SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16}


def bert():
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    tokenizer = hub.models.BertTokenizer(vocabulary=vocabulary, lowercase=True)
    backbone = hub.models.BertBackbone(
        vocabulary_size=len(vocabulary), max_sequence_length=16, **SIZES
    )
    backbone.enable_lora(2)
    return hub.models.BertTextClassifier(
        backbone,
        num_classes=3,
        preprocessor=hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=16),
    )


def gpt2():
    tokens = [*LETTERS, "Ġ", "ab", "<|endoftext|>"]
    tokenizer = hub.models.GPT2Tokenizer(
        vocabulary={token: i for i, token in enumerate(tokens)}, merges=["a b"]
    )
    backbone = hub.models.GPT2Backbone(vocabulary_size=len(tokens), max_sequence_length=16, **SIZES)
    return hub.models.GPT2CausalLM(
        backbone, preprocessor=hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=16)
    )


def vit():
    backbone = hub.models.ViTBackbone(
        image_shape=(8, 8, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16
    )
    converter = hub.layers.ViTImageConverter(image_size=(8, 8), scale=1 / 255)
    return hub.models.ViTImageClassifier(
        backbone,
        num_classes=3,
        preprocessor=hub.models.ViTImageClassifierPreprocessor(converter),
    )


TASKS = {"bert": (bert, TEXTS, LABELS), "gpt2": (gpt2, TEXTS, None), "vit": (vit, IMAGES, LABELS)}


def trained(task, x, y, sample_weight=None):
    model = dp.DPModel(task)
    optimizer = dp.DPSGD(0.5, noise_multiplier=1.0, seed=3)
    model.compile(optimizer, LOSS, log_raw_metrics=False)
    model.fit(x, y, sample_weight=sample_weight, batch_size=10, verbose=0)
    return model


def preprocessed_by_hub(task, x, y):
    """Arrays of what keras_hub's own fit trains on, from a batch of all records."""
    data = tf.data.Dataset.from_tensor_slices((x,) if y is None else (x, y)).batch(len(x))
    return next(data.map(task.preprocess_samples).as_numpy_iterator())


@pytest.mark.representative(1)
@pytest.mark.parametrize("name", TASKS)
def test_raw_records_train_like_preprocessed_ones(name):
    make, x, y = TASKS[name]
    keras.utils.set_random_seed(1)
    model = trained(make(), x, y)
    assert model.gradient_plan().engine == "ghost"

    keras.utils.set_random_seed(1)
    task = make()
    arrays = preprocessed_by_hub(task, x, y)
    task.preprocessor = None
    by_hand = trained(task, *arrays)
    for one, other in zip(model.get_weights(), by_hand.get_weights(), strict=True):
        assert np.array_equal(one, other)


def test_masks_that_are_drawn_at_random_are_refused():
    classifier = bert()
    backbone, tokenizer = classifier.backbone, classifier.preprocessor.tokenizer
    task = hub.models.BertMaskedLM(
        backbone,
        preprocessor=hub.models.BertMaskedLMPreprocessor(
            tokenizer, sequence_length=16, mask_selection_length=4
        ),
    )
    with pytest.raises(ValueError, match="preprocessing of BertMaskedLM draws random numbers"):
        trained(task, TEXTS, None)


@pytest.mark.filterwarnings("ignore:`compile\\(\\)` was not called as part of model loading")
def test_a_saved_task_takes_raw_records_again(tmp_path):
    model = trained(bert(), TEXTS, LABELS)
    model.save(tmp_path / "model.keras")
    loaded = dp.load_model(tmp_path / "model.keras")
    expected = model.predict(TEXTS, verbose=0)
    assert np.array_equal(loaded.predict(TEXTS, verbose=0), expected)
    assert loaded.epsilon(1e-3) == model.epsilon(1e-3)
