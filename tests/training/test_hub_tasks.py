"""Tasks of keras_hub, given raw strings and images."""

import io

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tf_adadp.sampling.preprocessing import preprocessed

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
    data = tf.data.Dataset.from_tensor_slices((x,) if y is None else (x, y)).batch(1000)
    return next(data.map(task.preprocess_samples).as_numpy_iterator())


@pytest.mark.representative(1, 2)
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


def test_the_word_of_one_record_does_not_decide_about_anothers_tokens():
    """Their fingerprints collide, and keras_hub's cache knows words by their fingerprints."""
    word, other = "hgefjhenhgnmpolh", "dpdbmalpmmbaheom"
    assert tf.fingerprint([word]).numpy().tolist() == tf.fingerprint([other]).numpy().tolist()
    task = gpt2()
    cache = task.preprocessor.tokenizer.cache
    alone, _, _ = preprocessed(task, [word])
    both, _, _ = preprocessed(task, [other, word])
    assert np.array_equal(alone["token_ids"][0], both["token_ids"][1])
    assert not np.array_equal(both["token_ids"][0], both["token_ids"][1])
    expected = [LETTERS.index(letter) for letter in word]
    assert alone["token_ids"][0][1:].tolist() == expected[:15]

    task.preprocessor.tokenizer([other])  # keras_hub's own cache has the other word from here on
    again, _, _ = preprocessed(task, [word])
    assert np.array_equal(again["token_ids"], alone["token_ids"])
    assert task.preprocessor.tokenizer.cache is cache


@pytest.mark.parametrize("pair", [False, True])
def test_tokens_are_those_of_keras_hub(pair):
    texts = [*TEXTS, "", " ", "ab abab <|endoftext|> ba", "<|endoftext|>", "a  b\n ab", "é ab"]
    tokens = [
        *LETTERS,
        "Ġ",
        "Ċ",
        "Ã",
        "©",
        "ab",
        "ba",
        "<|endoftext|>",
        "<s>",
        "</s>",
        "<pad>",
        "<mask>",
    ]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if pair:
        tokenizer = hub.models.RobertaTokenizer(vocabulary=vocabulary, merges=["a b", "b a"])
        layer = hub.models.RobertaTextClassifierPreprocessor(tokenizer, sequence_length=24)
    else:
        tokenizer = hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["a b", "b a"])
        layer = hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=24)
    task = gpt2()
    task.preprocessor = layer
    x, y = (np.array(texts), np.array(texts[::-1])) if pair else texts, np.zeros(len(texts))
    mine, _, _ = preprocessed(task, x, y if pair else None)
    theirs = preprocessed_by_hub(task, x, y if pair else None)[0]
    assert np.array_equal(mine["token_ids"], theirs["token_ids"])


@pytest.mark.parametrize(("nbest_size", "random"), [(0, False), (1, False), (5, True), (-1, True)])
def test_sentence_pieces_that_are_drawn_at_random_are_refused(nbest_size, random):
    text = pytest.importorskip("tensorflow_text")
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    proto = io.BytesIO()
    trainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_writer=proto,
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = text.SentencepieceTokenizer(model=proto.getvalue(), nbest_size=nbest_size)
    task = gpt2()
    task.preprocessor = lambda x: tokenizer.tokenize(x).to_tensor(shape=(None, 16))
    if random:
        with pytest.raises(ValueError, match="draws random numbers.*nbest_size other than 0 and 1"):
            preprocessed(task, TEXTS)
    else:
        assert preprocessed(task, TEXTS)[0].shape == (30, 16)


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
