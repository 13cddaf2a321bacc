"""Private names of Keras and TensorFlow: they exist, and only `keras_compat` uses them."""

import ast
import pathlib

import keras
import pytest
import tensorflow as tf

import tf_adadp
from tf_adadp.utils.keras_compat import INHERITED

PACKAGE = pathlib.Path(tf_adadp.__file__).parent
ALLOWED = PACKAGE / "utils" / "keras_compat.py"


def a_model():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse", metrics=["mae"])
    model.fit(tf.ones([2, 2]), tf.ones([2, 1]), verbose=0)
    return model


@pytest.mark.parametrize("owner", [keras.Model, keras.optimizers.Optimizer])
def test_inherited_names_exist(owner):
    model = a_model()
    of_theirs = model if owner is keras.Model else model.optimizer
    assert [name for name in INHERITED[owner] if not hasattr(of_theirs, name)] == []


def test_other_modules_import_nothing_private():
    found = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}."]
            elif isinstance(node, ast.Attribute):
                names = [f"{ast.unparse(node)}."]
            else:
                continue
            private = ("keras.src.", "tensorflow.python.", "tf.python.")
            found += [f"{path}:{node.lineno}" for name in names if name.startswith(private)]
    assert found == []


def test_other_modules_read_no_underscored_attribute_of_keras():
    """An underscored attribute is defined in this package, or listed as inherited."""
    trees = modules()
    ours = {"_replace", "_fields", "_neighboring_relation"}  # namedtuple's, dp_accounting's
    for _, tree in trees:
        ours |= set(defined(tree))
    inherited = {name for names in INHERITED.values() for name in names}
    found = []
    for path, tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr):
                continue
            of_self = ast.unparse(node.value) in ("self", "super()")
            if not (of_self and node.attr in inherited) and (
                node.attr in inherited or node.attr not in ours
            ):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def modules():
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path != ALLOWED]
    return [(path.relative_to(PACKAGE), ast.parse(path.read_text("utf-8"))) for path in paths]


def defined(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def is_private(name):
    return name.startswith("_") and not name.startswith("__")
