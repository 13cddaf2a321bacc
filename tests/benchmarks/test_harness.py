import json

import numpy as np
import pytest

from benchmarks import harness, models
from benchmarks.peers import measuring


def make_results(path, **options):
    return harness.Results(path, key=("method", "seed"), **{"one_machine": True, **options})


def test_models_have_the_sizes_they_are_known_by():
    assert models.tanh_cnn().count_params() == 26_010
    assert models.mlp(784, 1000, 10).count_params() == 784 * 1000 + 1000 + 1000 * 10 + 10
    assert models.mlp(64, 10).output_shape == (None, 10)


def test_models_give_logits():
    for model, shape in ((models.mlp(4, 3), (5, 4)), (models.tanh_cnn(), (5, 28, 28, 1))):
        rows = model(np.random.default_rng(0).normal(size=shape)).numpy().sum(axis=1)
        assert np.abs(rows - 1).max() > 1e-3


def test_random_data_fit_the_features():
    features = {"a": models.Features((3,), vocabulary=4), "b": models.Features((2, 5))}
    x, y = models.random_data(500, features, num_classes=3)
    assert x["a"].shape == (500, 3)
    assert x["a"].dtype == np.int32
    assert set(np.unique(x["a"])) == set(range(4))
    assert x["b"].shape == (500, 2, 5)
    assert x["b"].dtype == np.float32
    assert 0 <= x["b"].min() < 0.01 < 0.99 < x["b"].max() < 1
    assert set(np.unique(y)) == set(range(3))
    again, _ = models.random_data(500, features, num_classes=3)
    np.testing.assert_array_equal(x["b"], again["b"])


def test_digits_split_is_fixed_and_complete():
    x_train, y_train, x_test, y_test = models.digits()
    again = models.digits()
    assert len(x_train) + len(x_test) == 1797
    assert len(x_test) == len(y_test) == 360
    assert x_train.min() == 0
    assert x_train.max() == 1
    np.testing.assert_array_equal(x_test, again[2])
    assert min(np.bincount(y_test)) > 30


def test_results_replace_the_row_of_the_same_key_and_survive_a_restart(tmp_path):
    path = tmp_path / "deeper" / "results.json"
    results = make_results(path)
    results.put({"method": "a", "seed": 0, "accuracy": 0.5})
    results.put({"method": "a", "seed": 1, "accuracy": 0.6})
    results.put({"method": "a", "seed": 0, "accuracy": 0.7})
    again = make_results(path)
    assert again.find(method="a", seed=0)["accuracy"] == 0.7
    assert again.find(method="a", seed=0, accuracy=0.5) is None
    assert len(again.rows) == 2
    stored = json.loads(path.read_text())
    assert stored["machine"]["cores"] >= 1
    assert "tensorflow" in stored["machine"]["versions"]
    assert len(stored["runs"]) == 1
    assert not path.with_suffix(".partial").exists()


def test_results_of_another_machine_are_not_mixed_in(tmp_path):
    path = tmp_path / "results.json"
    make_results(path).put({"method": "a", "seed": 0})
    stored = json.loads(path.read_text())
    stored["machine"]["cpu"] = "another"
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="another machine.*--force"):
        make_results(path)
    assert len(make_results(path, one_machine=False).rows) == 1
    assert make_results(path, force=True).rows == []


def test_peak_memory_counts_what_was_freed_again():
    block = np.ones(2**25)  # 256 MiB
    with_block = measuring.peak_memory_mb()
    del block
    assert with_block > 256
    # Linux counts a thread's last pages in batches, hence the slack.
    assert measuring.peak_memory_mb() > with_block - 8


def test_markdown_table():
    assert harness.markdown_table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_a_process_that_fails_is_quoted():
    with pytest.raises(RuntimeError, match="python -m json.tool absent ended with"):
        harness.from_process("json.tool", "absent")


def test_runs_that_write_one_file_keep_each_others_rows(tmp_path):
    path = tmp_path / "r.json"
    first, second = make_results(path), make_results(path)
    first.put({"method": "a", "seed": 0, "value": 1})
    second.put({"method": "b", "seed": 0, "value": 2})
    first.put({"method": "a", "seed": 1, "value": 3})
    assert [row["value"] for row in make_results(path).rows] == [1, 2, 3]
    assert first.find(method="b", seed=0)["value"] == 2
