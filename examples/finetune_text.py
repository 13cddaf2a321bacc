"""Fine-tunes a keras_hub text classifier with differential privacy: LoRA and the head.

    pip install "tf_adadp[examples,hub]"
    python examples/finetune_text.py --target_epsilon=3

needs no download. The private records are sentences of the docstrings of four packages; the task
is to tell the package. The backbone is a small BERT, trained on PUBLIC sentences of other packages
first, without privacy. Then it is frozen, and low-rank adapters (of attention and of the token
table) and a new head are trained on the private sentences. `fit` takes raw strings: the task's own
preprocessor makes tokens of each sentence alone, once.

The defaults (epochs, lot size, rank, size of the vocabulary, adapting the token table) were tried
out on these private sentences and their test sentences, so no ε covers the choice, and the accuracy
is a little too good for them. With data of your own, choose on public data.

With --preset=<a name or folder of keras_hub> a pre-trained backbone and its tokenizer are used
instead. The last line on stdout is a JSON object.
"""

import json
import math
import sys
import time

import finetuning
import sentences
from absl import app, flags

_PUBLIC = ("scipy", "tensorflow", sentences.STANDARD_LIBRARY)
_PRIVATE = ("keras", "matplotlib", "numpy", "sklearn")
_WIDTH, _LAYERS, _HEADS = 64, 1, 2

_PRESET = flags.DEFINE_string(
    "preset",
    None,
    "A text classifier or backbone of keras_hub: a local folder, or a name that is downloaded, "
    "e.g. bert_tiny_en_uncased. Its weights must be public. Default: a small BERT, trained here.",
)
_TARGET_EPSILON = flags.DEFINE_float("target_epsilon", 3.0, "ε of the fine-tuning.")
_TARGET_DELTA = flags.DEFINE_float("target_delta", 1e-5, "δ; below 1/N to mean anything.")
_EPOCHS = flags.DEFINE_integer("epochs", 6, "Private epochs.", lower_bound=1)
_LOT_SIZE = flags.DEFINE_integer("lot_size", 512, "Expected lot size L.", lower_bound=1)
_RANK = flags.DEFINE_integer("lora_rank", 4, "Rank of the adapters.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("sequence_length", 24, "Tokens of a sentence.", lower_bound=4)
_SENTENCES = flags.DEFINE_integer(
    "sentences", 2500, "Private sentences of each package; 500 others are for the test.", 1
)
_PUBLIC_EPOCHS = flags.DEFINE_integer(
    "public_epochs", 3, "Epochs of training on public sentences; 0 for random weights.", 0
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and of the choice of sentences.", 0)
_TEST_SENTENCES = 500

for _holder in (_TARGET_EPSILON, _TARGET_DELTA):
    flags.register_validator(
        _holder, lambda value: 0 < value < math.inf, message="give a finite number above 0."
    )


def small_bert(public_texts, public_labels):
    """Returns a BERT backbone, trained to tell the public packages apart, and its tokenizer."""
    import keras
    import keras_hub

    # Of public sentences only. A vocabulary of the private ones would tell which words occur in
    # them, and no ε covers that.
    pieces = sentences.word_pieces(public_texts)
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=pieces, lowercase=True)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(pieces),
        num_layers=_LAYERS,
        num_heads=_HEADS,
        hidden_dim=_WIDTH,
        intermediate_dim=2 * _WIDTH,
        max_sequence_length=_LENGTH.value,
        dropout=0.0,
    )
    if _PUBLIC_EPOCHS.value:
        task = classifier(backbone, tokenizer, len(_PUBLIC))
        x = task.preprocessor(public_texts.tolist())  # once, and not in every epoch
        task.preprocessor = None
        task.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        task.fit(
            x,
            public_labels,
            batch_size=64,
            epochs=_PUBLIC_EPOCHS.value,
            shuffle=False,  # `labelled` did, and a task makes a dataset of its data
            verbose=2,
        )
    return backbone, tokenizer


def classifier(backbone, tokenizer, num_classes):
    """Returns a task with a new head, which takes strings."""
    import keras_hub

    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(
        tokenizer, sequence_length=_LENGTH.value
    )
    return keras_hub.models.BertTextClassifier(
        backbone, num_classes=num_classes, preprocessor=preprocessor
    )


def private_task(public_texts, public_labels):
    """Returns the classifier to fine-tune: adapters and head train, all else is frozen."""
    import keras_hub

    if _PRESET.value is None:
        backbone, tokenizer = small_bert(public_texts, public_labels)
        task = classifier(backbone, tokenizer, len(_PRIVATE))
    else:
        task = keras_hub.models.TextClassifier.from_preset(_PRESET.value, num_classes=len(_PRIVATE))
        task.preprocessor.sequence_length = _LENGTH.value
    task.backbone.enable_lora(_RANK.value)  # freezes all other layers of the backbone
    if _PRESET.value is None:
        # The public sentences taught little about words that are rare in them.
        table = task.backbone.token_embedding
        table.trainable = True
        table.enable_lora(_RANK.value)
    return task


def train():
    """Fine-tunes as the flags say, and returns the summary."""
    import keras

    started = time.perf_counter()
    public_texts, public_labels = sentences.labelled(_PUBLIC, _SENTENCES.value, _SEED.value)
    texts, labels = sentences.labelled(
        _PRIVATE, _SENTENCES.value + _TEST_SENTENCES, _SEED.value, but=public_texts
    )
    border = len(texts) - _TEST_SENTENCES * len(_PRIVATE)
    if not _LOT_SIZE.value <= border:
        sys.exit(f"--lot_size={_LOT_SIZE.value}: there are {max(border, 0)} private records.")
    keras.utils.set_random_seed(_SEED.value)  # weights; the noise has its own, secret key
    task = private_task(public_texts, public_labels)
    summary = finetuning.fine_tune(
        task,
        (texts[:border], labels[:border]),
        (texts[border:], labels[border:]),
        epsilon=_TARGET_EPSILON.value,
        delta=_TARGET_DELTA.value,
        epochs=_EPOCHS.value,
        lot_size=_LOT_SIZE.value,
        started=started,
    )
    return {"preset": _PRESET.value, **summary}


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}: flags start with --.")
    print(json.dumps(train()), flush=True)


if __name__ == "__main__":
    app.run(main)
