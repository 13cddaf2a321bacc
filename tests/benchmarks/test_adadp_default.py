"""The study of ADADP's default: jobs, a real run of one of them, tables."""

import dataclasses

import numpy as np
import pytest

import tf_adadp as dp
from benchmarks import adadp_default as study
from benchmarks import adadp_report, harness, lora_pretrained, models
from tf_adadp import accounting

TINY = study.Task("digits", study._mlp(64, 10), {3.0: (400, 10)})


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(study.TASKS, "tiny", TINY)
    monkeypatch.setattr(study, "SEEDS", (0, 1))
    study.load.cache_clear()


def test_every_job_is_asked_for_once():
    todo = list(study.jobs(study.PARTS, list(study.TASKS)))
    assert len(set(map(str, todo))) == len(todo)
    keys = [(*job[:4], dict(job[4]).get("setting")) for job in todo]
    assert len(set(keys)) == len(keys)
    tuned = [job for job in todo if job[0] == "study" and job[3] == "DPSGD"]
    default = [job for job in todo if job[0] == "study" and job[3] == "ADADP"]
    # The CNNs are run without a search.
    assert len(default) == len(tuned) + 2
    assert {job[1] for job in study.jobs(("study",), ["digits"])} == {"digits"}


def test_the_search_is_of_equal_effort():
    assert len({len(rates) for rates in study.SEARCH.values()}) == 1


def test_images_are_averaged():
    images = np.arange(2 * 4 * 4, dtype=np.float32).reshape(2, 4, 4)
    found = models.averaged(images, 2)
    assert found.shape == (2, 2, 2, 1)
    np.testing.assert_allclose(found[0, :, :, 0], [[2.5, 4.5], [10.5, 12.5]])
    colours = np.stack([images, -images], -1)
    np.testing.assert_allclose(models.averaged(colours, 2)[..., 1:], -found)


def test_every_architecture_takes_its_images():
    for name, task in study.TASKS.items():
        if task.side is not None and task.weights is None:
            assert task.build().output_shape == (None, 10), name


@pytest.fixture
def public_folder(tmp_path, monkeypatch):
    """A data folder of a few images, one constant grey for each of the ten classes."""
    monkeypatch.setenv(models.DATA_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(lora_pretrained, "_BLOCKS", 1)
    labels = np.arange(200) % 10
    images = np.broadcast_to(25 * labels[:, None, None], (200, 28, 28)).astype(np.uint8)
    arrays = {"x_train": images, "y_train": labels, "x_test": images[:50], "y_test": labels[:50]}
    np.savez(tmp_path / "mnist.npz", **arrays)
    study.load.cache_clear()
    yield tmp_path
    study.load.cache_clear()


def test_lora_needs_weights_from_pre_training(public_folder):
    assert study.has_data("mnist")
    assert not study.has_data("mnist_lora")
    with pytest.raises(FileNotFoundError, match=r"python -m benchmarks\.lora_pretrained"):
        study.TASKS["mnist_lora"].build()
    lora_pretrained.pretrain("mnist", epochs=1)
    assert study.has_data("mnist_lora")
    assert study.TASKS["mnist_lora"].build().output_shape == (None, 5)


def test_lora_trains_adapters_and_a_head_on_the_private_classes(public_folder, monkeypatch):
    public = lora_pretrained.encoder()
    public.save_weights(public_folder / lora_pretrained.weights_name("mnist"))
    x, y, x_test, y_test = study.load("mnist_lora")
    assert (x.shape, x_test.shape) == ((100, 14, 14, 1), (25, 14, 14, 1))
    assert set(y) == set(y_test) == set(range(5))
    np.testing.assert_allclose(x[:, 0, 0, 0], 25 * (y + 5) / 255, rtol=1e-6)

    made = []

    def build():
        made.append(lora_pretrained.adapted("mnist"))
        return made[-1]

    task = dataclasses.replace(study.TASKS["mnist_lora"], build=build)
    monkeypatch.setitem(study.TASKS, "mnist_lora", task)
    study.train("mnist_lora", dp.DPSGD(1.0, noise_multiplier=1.0, seed=0), 20, 2, seed=0)
    model = made[-1]
    adapters = [w.path for w in model.trainable_weights if "lora_kernel" in w.path]
    # The embedding of patches, four projections and two dense layers have two factors each.
    assert len(adapters) == 2 * (1 + 4 + 2)
    rest = [w.path for w in model.trainable_weights if "lora_kernel" not in w.path]
    assert rest == ["head/kernel", "head/bias"]

    frozen = [w for w in model.weights if not w.trainable]
    for found, expected in zip(frozen, public.weights, strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=found.path)
    assert all(np.abs(w).sum() > 0 for w in model.trainable_weights if w.name == "lora_kernel_b")

    private = dp.DPModel(model, gradient_engine="ghost")
    private.compile(dp.ADADP(noise_multiplier=1.0), models.loss(), log_raw_metrics=False)
    assert "gradient engine: ghost" in str(private.gradient_plan())


def test_a_search_goes_on_beyond_a_best_at_the_end():
    tried = study.search(lambda rate: -abs(rate - 7.0), (1.0, 2.0, 4.0))
    assert list(tried) == [1.0, 2.0, 4.0, 8.0, 16.0]
    tried = study.search(lambda rate: -abs(rate - 0.6), (1.0, 2.0, 4.0))
    assert list(tried) == [1.0, 2.0, 4.0, 0.5, 0.25]


def test_every_variant_can_be_made():
    for make in study.VARIANTS.values():
        assert isinstance(make(noise_multiplier=1.0), dp.DPOptimizer)


def test_a_tuned_job_tries_all_rates_on_held_out_data_and_spends_the_budget(tiny, monkeypatch):
    held_out = []
    train = study.train

    def counted(*args, **kwargs):
        held_out.append(kwargs.get("held_out", False))
        return train(*args, **kwargs)

    monkeypatch.setattr(study, "train", counted)
    monkeypatch.setitem(study.SEARCH, "DPSGD", (0.01, 2.0, 400.0))
    row = study.run_job(("study", "tiny", 3.0, "DPSGD", ()))
    assert held_out == [True, True, True, False, False]
    assert set(row["held_out"]) == {"0.01", "2.0", "400.0"}
    assert row["arguments"] == {"learning_rate": 2.0}
    assert len(row["accuracies"]) == 2
    assert min(row["accuracies"]) > 0.3
    assert row["charged_epsilon"] == pytest.approx(3.0, rel=2e-3)
    cost = accounting.epsilon(row["noise_multiplier"], 400 / 1437, 10, study.DELTA)
    assert row["charged_epsilon"] == pytest.approx(cost, rel=1e-3)


def test_a_default_job_takes_no_argument_and_can_be_repeated(tiny):
    row = study.run_job(("study", "tiny", 3.0, "ADADP", ()))
    assert row["arguments"] == {}
    assert row["held_out"] == {}
    assert study.run_job(("study", "tiny", 3.0, "ADADP", ()))["accuracies"] == row["accuracies"]


def test_other_seeds_than_those_of_the_study(tiny, monkeypatch):
    seeds = []
    monkeypatch.setattr(study, "train", lambda *args, **_: (seeds.append(args[-1]) or 0.5, 3.0))
    monkeypatch.setattr(study, "search", lambda score, rates: {4.0: 0.5})
    monkeypatch.setattr(study, "MORE_SEEDS", {("tiny", 3.0): 4})
    rows = [study.run_job(job) for job in study.jobs(("seeds",), ["tiny"])]
    assert [(row["method"], row["setting"]) for row in rows] == [
        ("ADADP", "seeds 10 to 13"),
        ("DPSGD", "seeds 10 to 13"),
    ]
    assert seeds == 2 * [10, 11, 12, 13]
    assert [row["arguments"] for row in rows] == [{}, {"learning_rate": 4.0}]


def test_changes_of_a_setting_are_made(tiny):
    changed = (("lot_size", 100), ("noise_multiplier", 2.0), ("setting", "L 100"))
    row = study.run_job(("sensitivity", "tiny", 3.0, "DPSGD", changed))
    assert (row["lot_size"], row["noise_multiplier"], row["setting"]) == (100, 2.0, "L 100")
    assert row["held_out"] == {}


def test_the_printed_form_costs_infinity(tiny):
    row = study.run_job(("ablation", "tiny", 3.0, "printed, ε = ∞", ()))
    assert row["charged_epsilon"] is None


def test_scaled_columns():
    x, _, x_test, _ = study.load("digits")
    scaled, _, scaled_test, _ = study.load("digits_scaled")
    used = x.max(0) > 0
    factors = scaled[:, used].max(0) / x[:, used].max(0)
    assert factors.max() / factors.min() > 100
    np.testing.assert_allclose(scaled_test[:, used], x_test[:, used] * factors, rtol=1e-4)


def _row(method, accuracies, **more):
    return {
        "part": "study",
        "task": "digits",
        "epsilon": 3.0,
        "method": method,
        "setting": None,
        "accuracies": accuracies,
        "arguments": {},
        **more,
    }


def test_tables_and_figure(tmp_path):
    rows = [
        _row("ADADP", [0.93, 0.95]),
        _row("DPSGD", [0.92, 0.92], arguments={"learning_rate": 4.0}),
        _row("ADAL", [0.9, 0.9], part="ablation"),
        _row("ADADP", [0.9, 0.8], part="sensitivity", setting="L 64"),
    ]
    assert adadp_report.differences(rows) == {("digits", 3.0): pytest.approx(2.0)}
    text = adadp_report.tables(rows)
    for part in ("94.00 ± 1.41", "92.00 ± 0.00 (4)", "+2.00", "90.00", "85.00 ± 7.07"):
        assert part in text
    adadp_report.plot(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert adadp_report.tables([]) == ""


def test_more_seeds_have_a_standard_error():
    rows = [
        _row("ADADP", [0.93, 0.95], part="seeds", setting="seeds 10 to 11"),
        _row("DPSGD", [0.92, 0.93], part="seeds", setting="seeds 10 to 11"),
    ]
    # √(2 + 0.5) / √2 points.
    expected = "| digits | 3 | 10 to 11 | 94.00 ± 1.41 | 92.50 ± 0.71 | +1.50 ± 1.12 |"
    assert adadp_report.tables(rows).splitlines()[2] == expected


def test_differences_by_group_of_networks():
    rows = [
        _row(method, accuracies, task=task)
        for task, ours in (("digits", 0.93), ("mnist_gru", 0.5), ("fashion_gru", 0.896))
        for method, accuracies in (("ADADP", [ours] * 3), ("DPSGD", [0.89, 0.9, 0.91]))
    ]
    lines = adadp_report.groups(rows).splitlines()[2:]
    # Φ(−0.5/SE) with SE = 1/√3 points: 0.193 in each cell.
    assert lines == [
        "| dense | 1 | +3.00 | +3.00 | +3.00 | 0 | 0.2 |",
        "| recurrent | 2 | -20.20 | -40.00 | -0.40 | 1 | 0.4 |",
        "| all | 3 | -12.47 | -40.00 | +3.00 | 1 | 0.6 |",
    ]


def test_chance_agrees_with_drawn_differences():
    ours, theirs = [0.90, 0.91, 0.93], [0.90, 0.90, 0.92]
    (chance,) = adadp_report.by_chance([_row("ADADP", ours), _row("DPSGD", theirs)]).values()
    # Means of three seeds of two equal methods; a false alarm at 5 standard errors.
    rng = np.random.default_rng(0)
    drawn = [rng.normal(0, np.std(a, ddof=1), (200_000, 3)).mean(1) for a in (ours, theirs)]
    below = np.mean(drawn[0] - drawn[1] < -0.005)
    assert chance == pytest.approx(below, abs=5 * np.sqrt(0.25 / 200_000))
    same = [_row(method, [0.9, 0.9]) for method in ("ADADP", "DPSGD")]
    assert list(adadp_report.by_chance(same).values()) == [0.0]


def test_results_are_resumed(tmp_path, monkeypatch):
    key = ("part", "task", "epsilon", "method", "setting")
    results = harness.Results(tmp_path / "r.json", key=key, one_machine=False)
    results.put(_row("ADADP", [0.9]))
    again = harness.Results(tmp_path / "r.json", key=key, one_machine=False)
    assert again.find(part="study", task="digits", epsilon=3.0, method="ADADP", setting=None)
