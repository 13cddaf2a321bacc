import json
import math
import pathlib
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
import tensorflow_datasets as tfds
import train
from absl import flags
from absl.testing import flagsaver
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import tf_adadp as dp

SCRIPT = pathlib.Path(train.__file__)
NUM_DIGITS = 1437
BLUE, RED = (31, 119, 180), (214, 39, 40)  # the curves of accuracy and of ε


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the script's main in this process and returns its last line of output, parsed."""

    def run(*arguments):
        arguments = ["train.py", f"--log_dir={tmp_path / 'logs'}", *arguments]
        with flagsaver.flagsaver():
            train.main(flags.FLAGS(arguments))
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def _epsilon(summary, accountant="rdp"):
    return dp.accounting.epsilon(
        summary["noise_multiplier"],
        summary["sampling_probability"],
        summary["steps"],
        summary["delta"],
        accountant,
    )


def _colours(path):
    """Counts the pixels of the picture that have the two curves' colours."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)
    assert min(pixels.shape[:2]) > 400
    return [int((np.abs(pixels - colour).max(-1) < 8).sum()) for colour in (BLUE, RED)]


def test_demo_as_a_script_trains_well_and_reports_it(tmp_path):
    """The command of `make demo`, shortened; seeded noise makes it always pass or never."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--optimizer=adadp", f"--log_dir={tmp_path}"]
        + ["--reproducible_noise", "--epochs=40"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    *progress, last = done.stdout.splitlines()
    summary = json.loads(last)
    assert summary["accuracy"] > 0.8
    assert summary["epsilon"] == pytest.approx(_epsilon(summary), rel=1e-9)
    assert summary["epsilon_pld"] == pytest.approx(_epsilon(summary, "pld"), rel=1e-6)
    assert 0 < summary["epsilon_pld"] < summary["epsilon"] < 4
    assert summary["delta"] == 1e-5 < 1 / NUM_DIGITS
    assert summary["reproducible_noise"] is True
    assert summary["versions"]["keras"]
    assert any(f"epsilon: {summary['epsilon']:.4f}" in line for line in progress)
    assert any("val_accuracy: " in line for line in progress)

    assert pathlib.Path(summary["figure"]) == tmp_path / "accuracy_epsilon.png"
    assert min(_colours(summary["figure"])) > 500
    scalars = EventAccumulator(str(tmp_path / "train"), size_guidance={"tensors": 0})
    logged = scalars.Reload().Tensors("batch_epsilon")
    assert [event.step for event in logged] == list(range(1, summary["steps"] + 1))
    last = float(make_ndarray(logged[-1].tensor_proto))
    assert last == pytest.approx(summary["epsilon"], rel=1e-5)
    images = EventAccumulator(str(tmp_path / "privacy")).Reload().Tags()["tensors"]
    assert set(images) == {"metrics_over_epsilon", "privacy"}


@pytest.mark.parametrize(
    "optimizer", ["dpsgd", "dpadam", "adal", "adan", "adaclip", "dpopt", "autosgd", "dpnadam"]
)
def test_every_optimizer_trains_and_is_charged(run, optimizer):
    clip = [] if optimizer == "autosgd" else ["--l2_norm_clip=0.5"]
    summary = run(
        f"--optimizer={optimizer}", "--model=logistic", "--epochs=1", "--lot_size=512",
        "--noise_multiplier=1.5", "--learning_rate=0.01", *clip,
    )  # fmt: skip
    assert summary["l2_norm_clip"] == (0.5 if clip else None)
    assert summary["optimizer"] == optimizer
    assert summary["steps"] == math.ceil(NUM_DIGITS / 512)
    assert summary["learning_rate"] == pytest.approx(0.01)
    assert summary["epsilon"] == pytest.approx(_epsilon(summary), rel=1e-9)


def test_without_privacy_there_is_no_epsilon(run):
    summary = run("--optimizer=nonprivate", "--epochs=4", "--lot_size=64")
    assert summary["accuracy"] > 0.8
    assert summary["epsilon"] is summary["epsilon_pld"] is summary["noise_multiplier"] is None
    assert summary["steps"] == 4 * math.ceil(NUM_DIGITS / 64)
    blue, red = _colours(summary["figure"])
    assert blue > 500
    assert red == 0


def test_max_epsilon_stops_before_it_is_exceeded(run):
    q = 256 / NUM_DIGITS
    budget = (dp.accounting.epsilon(2.0, q, 8, 1e-5) + dp.accounting.epsilon(2.0, q, 9, 1e-5)) / 2
    summary = run(
        "--model=logistic", "--epochs=3", "--lot_size=256", "--noise_multiplier=2.0",
        f"--max_epsilon={budget}",
    )  # fmt: skip
    assert summary["steps"] == 8  # of 18, in the middle of the second epoch
    assert summary["epsilon"] == pytest.approx(_epsilon(summary), rel=1e-9)


def test_target_epsilon_sets_the_noise(run):
    summary = run(
        "--model=logistic", "--epochs=2", "--lot_size=512", "--target_epsilon=1.5",
        "--target_delta=1e-4", "--clipping=local", "--local_clip_factor=1.1",
    )  # fmt: skip
    assert summary["delta"] == 1e-4
    assert 0.99 * 1.5 < summary["epsilon"] <= 1.5
    assert summary["epsilon"] == pytest.approx(_epsilon(summary), rel=1e-9)


def test_npz_file_in_data_dir(run, tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (40, 12, 12), dtype=np.uint8)
    y = np.arange(40, dtype=np.uint8) % 3
    np.savez(tmp_path / "tiny.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    summary = run(
        "--dataset=tiny", f"--data_dir={tmp_path}", "--lot_size=20", "--epochs=1",
        "--target_delta=1e-3",
    )  # fmt: skip
    assert summary["dataset"] == "tiny"
    assert summary["sampling_probability"] == 0.5
    assert summary["parameters"] == 144 * 256 + 256 + 256 * 3 + 3


def test_mnist_through_tensorflow_datasets(run, tmp_path):
    with tfds.testing.mock_data(num_examples=32):
        summary = run(
            "--dataset=mnist", f"--data_dir={tmp_path}", "--model=cnn", "--lot_size=16",
            "--epochs=1", "--optimizer=dpsgd", "--target_delta=1e-3",
        )  # fmt: skip
    assert summary["parameters"] == 26_010  # the network of the SA-DPSGD paper
    assert summary["steps"] == 2


@pytest.mark.parametrize(
    ("kind", "shape", "parameters"),
    [
        ("logistic", (8, 8, 1), 64 * 10 + 10),
        ("mlp", (8, 8, 1), 64 * 256 + 256 + 256 * 10 + 10),
        ("cnn", (8, 8, 1), 160 + 4640 + 4128 + 330),
        ("cnn", (28, 28, 1), 26_010),
        ("cnn", (32, 32, 3), 3088 + 8224 + 25_632 + 330),
    ],
)
def test_models(kind, shape, parameters):
    model = train.build_model(kind, shape, 10)
    assert model.count_params() == parameters
    assert model.output_shape == (None, 10)


def test_only_reproducible_noise_seeds_the_noise():
    seeds = []
    for extra in ([], ["--reproducible_noise"]):
        with flagsaver.flagsaver():
            flags.FLAGS(["train.py", "--seed=5", *extra])
            seeds.append(train.build_optimizer(3.0).seed)
    assert seeds == [None, 5]


def test_a_bad_flag_ends_the_script_with_an_error(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--noise_multiplier=1", "--target_epsilon=2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "noise_multiplier" in done.stderr
    assert "target_epsilon" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--noise_multiplier=1", "--target_epsilon=2"], "noise_multiplier"),
        (["--noise_multiplier=0"], "noise_multiplier"),
        (["--noise_multiplier=inf"], "noise_multiplier"),
        (["--target_epsilon=-1"], "target_epsilon"),
        (["--max_epsilon=0"], "max_epsilon"),
        (["--target_delta=1"], "target_delta"),
        (["--l2_norm_clip=nan"], "l2_norm_clip"),
        (["--learning_rate=0"], "learning_rate"),
        (["--local_clip_factor=0"], "local_clip_factor"),
        (["--epochs=0"], "epochs"),
        (["--lot_size=0"], "lot_size"),
        (["--optimizer=adam"], "optimizer"),
        (["--model=transformer"], "model"),
        (["--clipping=box"], "clipping"),
    ],
)
def test_flags_out_of_range_are_refused(arguments, name):
    with flagsaver.flagsaver(), pytest.raises(flags.Error, match=name):
        flags.FLAGS(["train.py", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lot_size=1438"], "--lot_size=1438: digits has 1437 training records"),
        (["--dataset=no_such_set"], "--dataset=no_such_set: .*neither"),
        (["--max_epsilon=0.01"], "--max_epsilon=0.01: the first step alone costs"),
        (["--optimizer=nonprivate", "--target_epsilon=1"], "has no privacy"),
        (["--optimizer=nonprivate", "--noise_multiplier=1"], "has no privacy"),
        (["--optimizer=nonprivate", "--max_epsilon=1"], "has no privacy"),
        (["--optimizer=dpsgd", "--clipping=local"], "only adan and adadp have it"),
        (["--optimizer=autosgd", "--l2_norm_clip=2"], "by its own norm"),
        (["--optimizer=adal", "--local_clip_factor=1.2"], "only adan and adadp have it"),
    ],
)
def test_settings_that_cannot_work_end_the_run_before_training(run, tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        run(*arguments)
    assert not (tmp_path / "logs").exists()
