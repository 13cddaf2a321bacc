import keras
import numpy as np
import pytest

import tf_adadp as dp
from benchmarks import models, workloads
from benchmarks.workloads import WORKLOADS, Contender

WEIGHTS = {
    "mlp": 784 * 1000 + 1000 + 1000 * 10 + 10,
    "cnn": 26_010,
    "cifar_cnn": 550_570,
    # Embedding, two blocks (attention 4·128·129, feed-forward, two normalisations), head.
    "transformer": 5000 * 128
    + 2 * (4 * 128 * 129 + 128 * 256 + 256 + 256 * 128 + 128 + 2 * 2 * 128)
    + 128 * 2
    + 2,
    "tabular": 8 * 1000 * 16 + 144 * 256 + 256 + 256 * 128 + 128 + 128 * 2 + 2,
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_models_have_the_stated_weights_and_take_the_data(name):
    workload = WORKLOADS[name].at(lot_size=3, num_examples=7)
    model = workload.build()
    assert model.count_params() == WEIGHTS[name]
    x, y = workload.data()
    logits = model(x)
    assert logits.shape == (len(y), workload.num_classes) == (7, workload.num_classes)
    assert y.max() < workload.num_classes
    assert np.isfinite(models.loss()(y, logits))
    assert np.abs(np.sum(logits, axis=1) - 1).max() > 1e-3  # not probabilities


def test_every_embedding_of_a_model_is_used_up_to_its_last_row():
    for name in ("transformer", "tabular"):
        workload = WORKLOADS[name]
        x, _ = workload.data()
        tokens = x["categorical"] if isinstance(x, dict) else x
        tables = [
            layer for layer in workload.build().layers if isinstance(layer, keras.layers.Embedding)
        ]
        assert {table.input_dim for table in tables} == {tokens.max() + 1}
        assert tokens.min() == 0
        assert len(tables) == (tokens.shape[1] if name == "tabular" else 1)


def test_a_tabular_models_columns_do_not_share_embeddings():
    model = models.tabular_mlp()
    x, _ = WORKLOADS["tabular"].at(1).data()
    x = {name: rows[:1] for name, rows in x.items()}
    x["categorical"] = np.zeros_like(x["categorical"])
    x["categorical"][0, 3] = 1
    swapped = {**x, "categorical": np.roll(x["categorical"], 1, axis=1)}
    assert np.abs(model(x) - model(swapped)).max() > 1e-4


def test_optimizers_clip_to_the_sets_they_are_listed_under():
    for name, optimizer in workloads.OPTIMIZERS.items():
        made = optimizer.make()
        assert isinstance(made, dp.DPOptimizer)
        adaptive = isinstance(made, (dp.ADADP, dp.ADAN))
        clipping = {"local": "box", "ellipsoid": "ellipsoid"}.get(getattr(made, "clipping", None))
        assert optimizer.clipping_set == (clipping if adaptive else "l2"), name
        assert all(optimizer.clipping_set in marks for marks in workloads.MEMORY_LIMITS.values())


def test_contenders_say_what_is_compiled():
    assert Contender("adadp_local:noxla", "auto").jit_compile is False
    assert Contender("adadp_local:noxla", "auto").name == "adadp_local"
    assert Contender("dpsgd", "auto").jit_compile == "auto"
    assert [plain.jit_compile for plain in workloads.PLAIN] == ["auto", False]


def test_data_are_ten_lots_unless_said_otherwise():
    mlp = WORKLOADS["mlp"]
    assert mlp.fields() == {"model": "mlp", "lot_size": 600, "examples": 6000}
    assert mlp.at(64).num_examples == 640
    assert mlp.at(64, 81_920).num_examples == 81_920
    with pytest.raises(ValueError, match="100 examples are fewer than a lot of 600.*--examples"):
        mlp.at(600, 100)


def row(method, engine, model="mlp", lot_size=600):
    return {"model": model, "lot_size": lot_size, "method": method, "engine": engine}


def test_marks_are_for_the_set_the_engine_and_the_models_own_lot():
    marks = {
        ("mlp", "dpsgd"): (1.8, 1.5),
        ("mlp", "dpadam"): (1.8, 1.5),
        ("mlp", "dprmsprop"): (1.8, 1.5),
        ("mlp", "adadp"): (2.8, 2.0),
        ("mlp", "adadp_local:xla"): (10.0, 3.0),
        ("cnn", "dpsgd"): (3.5, 1.5),
        ("cnn", "adan"): (4.0, 2.0),
        ("cnn", "adadp_local"): (4.0, 3.0),
        ("cifar_cnn", "dpsgd"): (None, None),
    }
    for (model, method), (time, memory) in marks.items():
        this = row(method, "auto", model, WORKLOADS[model].lot_size)
        assert workloads.time_limit(this) == time
        assert workloads.memory_limit(this) == memory
    assert workloads.time_limit(row("adadp", "vectorized")) == 60
    assert workloads.time_limit(row("adadp_local", "vectorized")) == 20
    assert workloads.time_limit(row("adadp_local", "vectorized", "cnn", 512)) == 12
    assert workloads.memory_limit(row("dpsgd", "vectorized")) == 3
    for other in (row("dpsgd", "auto", lot_size=64), row("keras", None), row("opacus:ghost", None)):
        assert workloads.time_limit(other) is None
        assert workloads.memory_limit(other) is None
