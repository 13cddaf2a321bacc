"""Makes the tokenizers of keras_hub functions of one record."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_adadp.utils.keras_compat import layers_of

_CACHE = "BytePairTokenizerCache"  # keras_hub's class, which it does not export
SENTENCE_PIECE = "SentencepieceTokenizeOp"  # its state is its model, which no record changes


@contextlib.contextmanager
def without_caches(*holders: Any) -> Iterator[None]:
    """Replaces the caches of byte-pair tokenizers while a graph is traced.

    keras_hub keeps the tokens of every word that it has seen, by a 64-bit fingerprint of the word.
    Fingerprints can be made to collide, and then the word of one record would decide another's
    tokens. A graph that is traced here keeps no words at all.

    Args:
        holders: layers or models that hold the tokenizers; others are passed over.
    """
    layers = [layer for h in holders if isinstance(h, keras.Layer) for layer in layers_of(h)]
    tokenizers = [
        layer for layer in layers if type(getattr(layer, "cache", None)).__name__ == _CACHE
    ]
    caches = [tokenizer.cache for tokenizer in tokenizers]
    try:
        for tokenizer in tokenizers:  # not by setattr, which would have Keras track the object
            object.__setattr__(tokenizer, "cache", _Words(tokenizer.unsplittable_tokens or ()))
        yield
    finally:
        for tokenizer, cache in reversed(list(zip(tokenizers, caches, strict=True))):
            object.__setattr__(tokenizer, "cache", cache)


class _Words:
    """Has the methods of keras_hub's cache, and forgets the words after one call of the tokenizer.

    The tokenizer looks all words of a record up, inserts tokens for those that were not found, and
    looks all of them up once more.

    Args:
        unsplit: the words that are tokens themselves, which are always found.
    """

    def __init__(self, unsplit):
        self._unsplit = tuple(unsplit)
        self._inserted = None

    def insert(self, words, values):
        """Keeps the tokens of those words that were not found, in their order."""
        del words
        self._inserted = values

    def lookup(self, words):
        """Returns the tokens of each word, "" where it is not found."""
        known = tf.constant(self._unsplit, tf.string, [len(self._unsplit)])
        is_known = tf.reduce_any(words[:, tf.newaxis] == known[tf.newaxis], 1)
        found = tf.where(is_known, words, "")
        if self._inserted is not None:
            found = tf.tensor_scatter_nd_update(found, tf.where(found == ""), self._inserted)
            self._inserted = None
        return found


def chooses_best_pieces(nodes: Iterable[tf.compat.v1.NodeDef]) -> bool:
    """Tells whether each SentencePiece operation of a graph gives the best pieces of its text.

    With another `nbest_size` than 0 and 1, it draws one of several ways to split the text.

    Args:
        nodes: the nodes of a graph or of a function.
    """
    nodes = {node.name: node for node in nodes}
    for node in nodes.values():
        if node.op == SENTENCE_PIECE:
            size = nodes.get(node.input[2].partition(":")[0])
            if size is None or size.op != "Const":
                return False
            if not np.isin(tf.make_ndarray(size.attr["value"].tensor), (0, 1)).all():
                return False
    return True
