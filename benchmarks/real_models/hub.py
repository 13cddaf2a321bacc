"""Models of keras_hub, made from configurations: nothing is downloaded, nothing preprocessed.

The extra `hub` installs keras_hub.
"""

import keras
import numpy as np

from benchmarks.real_models.entry import classes, crossentropy, images, tokens

_RANK = 4


def bert_classifier(rows, small=False):
    """A BERT text classifier, all weights trainable."""
    hub = _keras_hub()
    vocabulary, length, width, layers = (50, 8, 8, 1) if small else (5000, 64, 128, 2)
    backbone = hub.models.BertBackbone(
        vocabulary_size=vocabulary,
        num_layers=layers,
        num_heads=2,
        hidden_dim=width,
        intermediate_dim=2 * width,
        max_sequence_length=length,
    )
    model = hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None)
    x = _padded(rows, vocabulary, length)
    x["segment_ids"] = np.zeros_like(x["token_ids"])
    x["segment_ids"][:, length // 2 :] = 1
    return model, x, classes(rows, 3), crossentropy()


def gpt2_lora(rows, small=False):
    """A GPT-2 language model with low-rank adapters, the only weights that train."""
    hub = _keras_hub()
    vocabulary, length, width, layers = (50, 8, 8, 1) if small else (5000, 64, 128, 2)
    backbone = hub.models.GPT2Backbone(
        vocabulary_size=vocabulary,
        num_layers=layers,
        num_heads=2,
        hidden_dim=width,
        intermediate_dim=4 * width,
        max_sequence_length=length,
    )
    return _causal(hub.models.GPT2CausalLM, backbone, rows, vocabulary, length)


def gemma_lora(rows, small=False):
    """A Gemma language model with low-rank adapters, the only weights that train."""
    hub = _keras_hub()
    vocabulary, length, width, layers = (50, 8, 8, 1) if small else (5000, 64, 128, 2)
    backbone = hub.models.GemmaBackbone(
        vocabulary_size=vocabulary,
        num_layers=layers,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=width,
        intermediate_dim=4 * width,
        head_dim=width // 2,
    )
    return _causal(hub.models.GemmaCausalLM, backbone, rows, vocabulary, length)


def vit_classifier(rows, small=False):
    """A vision transformer, all weights trainable."""
    hub = _keras_hub()
    size, patch, width, layers = (8, 4, 8, 1) if small else (64, 8, 128, 4)
    backbone = hub.models.ViTBackbone(
        image_shape=(size, size, 3),
        patch_size=patch,
        num_layers=layers,
        num_heads=2,
        hidden_dim=width,
        mlp_dim=2 * width,
        dropout=0.1,
        attention_dropout=0.1,
    )
    model = hub.models.ViTImageClassifier(backbone, num_classes=10, preprocessor=None)
    return model, images(rows, size, size, 3), classes(rows, 10), crossentropy()


def _causal(task, backbone, rows, vocabulary, length):
    """A language model that predicts the next token, with adapters that have been trained a bit."""
    backbone.enable_lora(_RANK)
    model = task(backbone, preprocessor=None)
    rng = np.random.default_rng(3)
    for weight in model.trainable_weights:
        weight.assign(rng.normal(scale=0.1, size=weight.shape))  # one factor starts at zero
    x = _padded(rows, vocabulary, length)
    y = np.roll(x["token_ids"], -1, axis=1)
    return model, x, y, keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _padded(rows, vocabulary, length):
    ids = tokens(rows, vocabulary, length, padded=length // 4)
    return {"token_ids": ids, "padding_mask": (ids != 0).astype(np.int32)}


def _keras_hub():
    import keras_hub

    return keras_hub
