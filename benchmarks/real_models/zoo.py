"""The zoo: models as others write them, from three places.

keras.applications, keras_hub, and code in the manner of the examples on keras.io, written anew. A
new model is a builder `make(rows, small=False)` that returns `model, x, y, loss`, and one entry
here.
"""

import functools

from benchmarks.real_models import applications, hub, images, tables, text
from benchmarks.real_models.entry import RealModel


def _heads():
    for name in applications.NAMES:
        yield RealModel(
            f"{name.lower()}_head",
            f"{name}, frozen, new head",
            functools.partial(applications.head, name),
        )


def _fine_tuned():
    for name in applications.NAMES:
        yield RealModel(
            f"{name.lower()}_all",
            f"{name}, all but BatchNormalization",
            functools.partial(applications.all_but_batch_norm, name),
            group="ordinary" if name == "ResNet50V2" else "depthwise",
            methods=("dpsgd",),
        )


def _of_keras_hub():
    for name, title in (
        ("bert_classifier", "BERT classifier, keras_hub"),
        ("gpt2_lora", "GPT-2 with LoRA, keras_hub"),
        ("gemma_lora", "Gemma with LoRA, keras_hub"),
        ("vit_classifier", "ViT classifier, keras_hub"),
    ):
        yield RealModel(name, title, getattr(hub, name), needs="keras_hub")


MODELS = {
    entry.name: entry
    for entry in (
        RealModel("transformer", "transformer of custom layers", text.transformer),
        RealModel("recommender", "recommender, subclassed", tables.recommender, lot_size=256),
        RealModel("vae", "variational autoencoder, add_loss", images.vae, lot_size=64),
        RealModel("unet", "U-Net, group normalisation", images.unet),
        RealModel("wide_and_deep", "wide and deep", tables.wide_and_deep, lot_size=256),
        RealModel("mixer", "MLP-Mixer", images.mixer),
        RealModel("vit", "ViT from scratch", images.vit),
        RealModel("conv_autoencoder", "convolutional autoencoder", images.conv_autoencoder),
        RealModel("subclassed_ops", "subclassed, Lambda and keras.ops", tables.subclassed_ops),
        RealModel(
            "bidirectional_lstm", "bidirectional LSTM", text.bidirectional_lstm, group="recurrent"
        ),
        RealModel("masked_gru", "GRU, masked zeros", text.masked_gru, group="recurrent"),
        *_heads(),
        *_fine_tuned(),
        *_of_keras_hub(),
    )
}
