"""PrivacyCallback: ε in every log, and a stop before the budget is exceeded."""

import contextlib
import csv
import gc
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_adadp as dp
from tests.helpers import ROWS, data, private_model
from tf_adadp import callbacks
from tf_adadp.accounting.composing import compose
from tf_adadp.accounting.curve import metrics_over_epsilon
from tf_adadp.accounting.files.ledger_file import LedgerFile

DELTA = 1e-3
STEPS = 4  # per epoch of lots of 30


def after(steps, accountant="rdp", sigma=1.0):
    return dp.accounting.epsilon(sigma, 30 / ROWS, steps, DELTA, accountant)


def fit(private, callbacks, epochs=3, **kwargs):
    x, y = data()
    return private.fit(
        x, y, batch_size=30, epochs=epochs, verbose=0, callbacks=callbacks, **kwargs
    ).history


@pytest.mark.representative(1)
@pytest.mark.parametrize("accountant", ["rdp", "pld", "theorem1"])
def test_every_epoch_has_its_epsilon(accountant):
    x, y = data()
    history = fit(
        private_model(), [dp.PrivacyCallback(DELTA, accountant=accountant)],
        validation_data=(x, y),
    )  # fmt: skip
    assert history["epsilon"] == pytest.approx(
        [after(STEPS * e, accountant) for e in (1, 2, 3)], rel=1e-6
    )
    assert "val_accuracy" in history


@pytest.mark.extended
def test_epsilon_reaches_callbacks_that_stand_before_it(tmp_path):
    seen = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["epsilon"])

    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    board = keras.callbacks.TensorBoard(tmp_path / "board", update_freq=1)
    fit(private_model(), [log, board, Sees(), dp.PrivacyCallback(DELTA)], epochs=2)
    assert seen == pytest.approx([after(s) for s in range(1, 9)], rel=1e-6)
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["epsilon"]) for row in rows] == pytest.approx([after(4), after(8)])
    scalars, images = written(tmp_path / "board")
    assert scalars["epoch_epsilon"] == pytest.approx({0: after(4), 1: after(8)}, rel=1e-6)
    expected = {step: after(step) for step in range(1, 9)}
    assert scalars["batch_epsilon"] == pytest.approx(expected, rel=1e-6)
    (image,) = images  # no metric that ε covers, nor of other records
    assert image[:2] == ("privacy/privacy", 8)
    assert picture(image)[..., :3].std() > 5  # it is not blank


def written(board):
    """The scalars in a folder of TensorBoard's, {tag: {step: value}}, and the images."""
    scalars, images = {}, []
    for path in sorted(board.rglob("events*")):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "images":
                    name = f"{path.parent.relative_to(board)}/{value.tag}"
                    images.append((name, event.step, tf.make_ndarray(value.tensor)))
                else:
                    found = float(tf.make_ndarray(value.tensor))
                    scalars.setdefault(value.tag, {})[event.step] = found
    return scalars, images


def picture(image):
    """The pixels of an image that `written` found."""
    width, height, png = image[2]
    pixels = tf.io.decode_png(png).numpy()
    assert (int(height), int(width)) == pixels.shape[:2]
    return pixels


def test_tensorboard_has_epsilon_at_each_of_its_writes(tmp_path):
    """The file is written after every third execution of two steps."""
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=3, write_graph=False)
    fit(private_model(steps_per_execution=2), [board, dp.PrivacyCallback(DELTA)], epochs=3)
    scalars, _ = written(tmp_path)
    assert scalars["batch_epsilon"] == pytest.approx({3: after(6), 6: after(12)}, rel=1e-6)


def test_the_image_of_accuracy_over_epsilon_has_what_was_measured(tmp_path, monkeypatch):
    drawn = []

    def draw(points, *priced_by):
        figure = metrics_over_epsilon(points, *priced_by)
        drawn.append([{line.get_label(): line for line in a.get_lines()} for a in figure.axes])
        return figure

    monkeypatch.setattr(callbacks, "metrics_over_epsilon", draw)
    monkeypatch.setattr(callbacks, "_SECONDS_BETWEEN_IMAGES", 0.0)
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    history = fit(
        private_model(metrics=["accuracy"]), [board, dp.PrivacyCallback(DELTA)],
        validation_data=data(),
    )  # fmt: skip
    _, images = written(tmp_path)
    over = [image for image in images if image[0] == "privacy/metrics_over_epsilon"]
    assert [step for _, step, _ in over] == [4, 8, 12, 12]  # after each epoch, and at the end
    assert [name for name, _, _ in images].count("privacy/privacy") == 1
    (lines,) = drawn[-1]
    assert set(lines) == {"validation"}  # no raw training metric
    at, value = lines["validation"].get_data()
    assert list(at) == history["epsilon"]
    assert list(value) == history["val_accuracy"]
    blue = (np.abs(picture(over[-1])[..., :3].astype(int) - (31, 119, 180)).max(-1) < 8).sum()
    assert blue > 100


def test_images_are_not_drawn_at_every_short_epoch(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    fit(private_model(), [board, dp.PrivacyCallback(DELTA)], epochs=2, validation_data=data())
    assert [step for _, step, _ in written(tmp_path)[1]] == [8, 8]


def test_without_matplotlib_training_goes_on_without_images(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    callback = dp.PrivacyCallback(DELTA, log_dir=tmp_path)
    monkeypatch.setattr(callbacks, "_SECONDS_BETWEEN_IMAGES", 0.0)
    history = fit(private_model(), [callback], epochs=2, validation_data=data())
    assert history["epsilon"] == pytest.approx([after(4), after(8)])
    assert capsys.readouterr().out.count("No images for TensorBoard") == 1
    assert not list(tmp_path.iterdir())


def test_values_that_are_no_single_number_have_no_place_in_the_image():
    logs = {"val_accuracy": np.float32(0.5), "val_by_class": np.array([0.4, 0.6])}
    (axes,) = metrics_over_epsilon([(1.0, logs)], DELTA).axes
    assert axes.get_ylabel() == "accuracy"
    assert metrics_over_epsilon([(1.0, {"val_by_class": np.zeros(2)})], DELTA) is None


def test_infinite_epsilons_have_no_place_in_the_image():
    logs = {"val_accuracy": 0.5, "accuracy": 0.9, "epsilon": 1.0}
    assert metrics_over_epsilon([(np.inf, logs)], DELTA) is None
    assert metrics_over_epsilon([(1.0, {"accuracy": 0.9})], DELTA) is None
    (axes,) = metrics_over_epsilon([(1.0, logs), (np.inf, logs)], DELTA).axes
    (line,) = axes.get_lines()
    assert line.get_xydata().tolist() == [[1.0, 0.5]]


def test_the_image_has_a_panel_for_each_metric_and_losses_where_they_are_all():
    many = {f"{kind}_m{i}": 0.1 * i for i in range(4) for kind in ("val", "released")}
    figure = metrics_over_epsilon([(1.0, {"val_loss": 2.0, **many})], DELTA)
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_ylabel() for axes in shown] == ["m0", "m1", "m2", "m3"]
    labels = [line.get_label() for line in shown[0].get_lines()]
    assert labels == ["training, released", "validation"]
    (axes,) = metrics_over_epsilon([(1.0, {"val_loss": 2.0})], DELTA).axes
    assert axes.get_ylabel() == "loss"


@pytest.mark.representative(1)
@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_stops_before_the_budget_is_exceeded_also_within_an_epoch(steps_per_execution, accountant):
    budget = (after(6, accountant) + after(7, accountant)) / 2
    private = private_model(steps_per_execution=steps_per_execution)
    history = fit(
        private, [dp.PrivacyCallback(DELTA, max_epsilon=budget, accountant=accountant)], epochs=9
    )
    assert private.ledger.steps == 6
    assert private.epsilon(DELTA, accountant) <= budget < after(7, accountant)
    assert history["epsilon"][-1] == private.epsilon(DELTA, accountant)


def test_a_budget_of_exactly_the_epochs_is_used_up():
    private = private_model()
    fit(private, [dp.PrivacyCallback(DELTA, max_epsilon=after(8))], epochs=2)
    assert private.ledger.steps == 8


def test_a_spent_budget_is_an_error_and_nothing_is_trained():
    private = private_model()
    callback = dp.PrivacyCallback(DELTA, max_epsilon=after(5))
    fit(private, [callback], epochs=9)
    before = private.get_weights()
    with pytest.raises(ValueError, match=r"max_epsilon=.* leaves no room.*spent"):
        fit(private, [callback])
    for a, b in zip(before, private.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert private.ledger.steps == 5


def test_several_fits_add_up():
    private = private_model()
    callback = dp.PrivacyCallback(DELTA)
    fit(private, [callback], epochs=1)
    history = fit(private, [callback], epochs=1)
    assert history["epsilon"] == [pytest.approx(after(8))]


def test_epsilon_without_the_callback_is_charged_all_the_same():
    private = private_model()
    fit(private, [], epochs=1)
    assert private.epsilon(DELTA) == pytest.approx(after(4))


class AtEveryStep(keras.callbacks.Callback):
    """Reads the ledger file just before and after each step, as a killed process would leave it."""

    def __init__(self, path):
        super().__init__()
        self.path, self.seen = path, []

    def look(self, batch, logs=None):
        stored = dp.PrivacyLedger.load(self.path)
        self.seen.append((self.model.ledger.steps, stored.steps, stored.epsilon(DELTA)))

    on_train_batch_begin = on_train_batch_end = look


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    ("interval", "at_once", "max_steps"),
    [(1, 1, None), (3, 1, None), (100, 1, None), (3, 2, None), (2, 4, 7), (5, 1, 7)],
)
def test_the_ledger_file_is_never_behind_and_at_most_one_interval_ahead(
    interval, at_once, max_steps, tmp_path
):
    path, budget = tmp_path / "ledger.json", None
    if max_steps:
        budget = (after(max_steps) + after(max_steps + 1)) / 2
    private = private_model(steps_per_execution=at_once)
    callback = dp.PrivacyCallback(
        DELTA, max_epsilon=budget, ledger_path=path, ledger_interval=interval
    )
    look = AtEveryStep(path)
    fit(private, [callback, look], epochs=3)
    ahead = []
    for place, (charged, stored, epsilon) in enumerate(look.seen):
        # Before a step, what is about to be released is in the file already.
        released = charged + (at_once if place % 2 == 0 else 0)
        assert charged <= released <= stored <= charged + max(interval, at_once)
        assert stored <= (max_steps or 12)
        assert after(released) * (1 - 1e-12) <= epsilon <= after(stored) * (1 + 1e-12)
        ahead.append(stored - charged)
    assert max(ahead) == min(max(interval, at_once), max_steps or 12)
    stored = dp.PrivacyLedger.load(path)
    assert stored.steps == private.ledger.steps == (max_steps or 12) // at_once * at_once
    assert stored.epsilon(DELTA) == private.epsilon(DELTA)
    assert not stored.odometer_reasons


def test_an_exception_leaves_an_exact_file_that_the_next_run_continues(tmp_path):
    path = tmp_path / "ledger.json"

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.ledger.steps == 6:
                raise KeyboardInterrupt

    private = private_model()
    with pytest.raises(KeyboardInterrupt):
        fit(private, [dp.PrivacyCallback(DELTA, ledger_path=path), Interrupt()])
    stored = dp.PrivacyLedger.load(path)
    assert stored.entries == private.ledger.entries
    assert "KeyboardInterrupt ended training after 6 of 12" in stored.odometer_reasons[0]
    resumed = private_model()
    history = fit(resumed, [dp.PrivacyCallback(DELTA, ledger_path=path)], epochs=1)
    assert history["epsilon"] == [pytest.approx(after(10))]
    assert dp.PrivacyLedger.load(path).epsilon(DELTA) == history["epsilon"][0]


def test_what_is_refused_before_training_leaves_file_and_weights_alone(tmp_path):
    path = tmp_path / "ledger.json"
    fit(
        private_model(),
        [dp.PrivacyCallback(DELTA, ledger_path=path, dataset="census")],
        epochs=1,
    )
    good = path.read_text()
    x, y = data(ROWS // 2)
    private = private_model()
    before = private.get_weights()

    def refused(error, match, x=None, y=None, text=good, **arguments):
        path.write_text(text)
        callback = dp.PrivacyCallback(DELTA, ledger_path=path, **arguments)
        x, y = data() if x is None else (x, y)
        with pytest.raises(error, match=match):
            private.fit(x, y, batch_size=30, verbose=0, callbacks=[callback])
        assert path.read_text() == text
        assert private.ledger.steps == 0
        for a, b in zip(before, private.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)

    refused(ValueError, r"ledger\.json.*number of records is 120, that of the run 60", x, y)
    refused(ValueError, r"ledger\.json.*'census', that of the run 'survey'", dataset="survey")
    refused(ValueError, r"ledger\.json.*truncated", text=good[:-200])
    refused(ValueError, r"ledger\.json.*edited", text=good.replace('"count": 4', '"count": 1'))
    refused(ValueError, r"ledger\.json.*newer", text=good.replace('"version": 2', '"version": 3'))
    path.write_text(good)
    other = LedgerFile(path)
    refused(BlockingIOError, r"in use by another run.*ledger\.json")
    other.close()
    again = [dp.PrivacyCallback(DELTA, ledger_path=path) for _ in range(2)]
    with pytest.raises(BlockingIOError, match="in use"):
        fit(private, again, epochs=1)
    assert path.read_text() == good  # and the first let go of it:
    x, y = data(ROWS // 2)
    callback = dp.PrivacyCallback(DELTA, ledger_path=path, same_data=True)
    private.fit(x, y, batch_size=30, verbose=0, callbacks=[callback])
    assert dp.PrivacyLedger.load(path).steps == 6
    fit(private, [dp.PrivacyCallback(DELTA, ledger_path=path)], epochs=1)  # said once for all


def test_early_stopping_makes_epsilon_an_odometer_reading():
    x, y = data()
    stopping = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=0)
    private = private_model()
    budget = after(40)
    fit(
        private,
        [stopping, dp.PrivacyCallback(DELTA, max_epsilon=budget)],
        epochs=9,
        validation_data=(x, y),
    )
    (reason,) = private.ledger.odometer_reasons
    assert "EarlyStopping(monitor='val_loss') ended training after 8 of 36 planned" in reason
    text = " ".join(private.ledger.statement(DELTA).split())
    assert "odometer reading" in text
    assert f"epsilon = {budget:.6g} at delta = 0.001 is guaranteed" in text
    # Where it did not stop anything, the number of steps was the planned one.
    patient = private_model()
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=9)
    fit(patient, [stopping, dp.PrivacyCallback(DELTA)], epochs=2, validation_data=(x, y))
    assert patient.ledger.odometer_reasons == ()


@pytest.mark.extended
@pytest.mark.parametrize("at_once", [1, 2])
def test_a_budget_holds_over_fits_whose_noise_follows_from_results(at_once):
    """The filter's order stays that of the first fit, so the sum at this order is bounded."""
    budget = after(16)
    private = private_model(steps_per_execution=at_once)
    fit(private, [dp.PrivacyCallback(DELTA, max_epsilon=budget)], epochs=3)
    (begun,) = private.ledger.budgets
    assert begun.filter.epsilon_of(compose(private.ledger.entries)) < budget
    private.compile(
        dp.DPSGD(0.1, noise_multiplier=3.0), private.loss, jit_compile=False,
        steps_per_execution=at_once,
    )  # fmt: skip
    event = private.optimizer.event(private.step_law)
    room = private.ledger.remaining_under(begun.filter, event)
    assert 0 < room < private.ledger.remaining(event, budget, DELTA, law=private.step_law)
    callback = dp.PrivacyCallback(DELTA, max_epsilon=budget)
    fit(private, [callback], epochs=1000)
    assert private.ledger.steps == 12 + room // at_once * at_once
    assert private.ledger.budgets == (begun,)
    assert begun.outside == 0
    assert private.epsilon(DELTA) <= budget
    assert "(2 settings)" in private.ledger.odometer_reasons[0]


def test_epsilon_at_further_deltas():
    callback = dp.PrivacyCallback(DELTA, extra_deltas=[1e-4, 1e-6])
    history = fit(private_model(), [callback], epochs=2)
    for delta in (1e-4, 1e-6):
        assert history[f"epsilon_at_{delta:g}"] == [
            dp.accounting.epsilon(1.0, 30 / ROWS, STEPS * e, delta) for e in (1, 2)
        ]


def test_the_printed_prior_costs_infinity():
    private = private_model(dp.ADADP(noise_multiplier=4.0, prior="raw"))
    assert fit(private, [dp.PrivacyCallback(DELTA)], epochs=1)["epsilon"] == [np.inf]
    without_noise = private_model(dp.DPSGD(0.1, noise_multiplier=0, allow_no_noise=True))
    assert fit(without_noise, [dp.PrivacyCallback(DELTA)], epochs=1)["epsilon"] == [np.inf]


def test_delta_of_one_over_n_warns():
    x, y = data()
    private, callback = private_model(), dp.PrivacyCallback(1 / ROWS)
    with pytest.warns(dp.PrivacyWarning, match="not below 1/120"):
        private.fit(x, y, batch_size=30, verbose=0, callbacks=[callback])


def test_reproducible_noise_is_said():
    private = private_model(dp.DPSGD(0.1, noise_multiplier=1.0, seed=1))
    fit(private, [], epochs=1)
    assert "reproducible noise" in private.ledger.statement(DELTA)
    secret = private_model()
    fit(secret, [], epochs=1)
    assert "reproducible noise" not in secret.ledger.statement(DELTA)


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.EarlyStopping(monitor="loss"),
        keras.callbacks.ReduceLROnPlateau(monitor="accuracy"),
        keras.callbacks.ModelCheckpoint("m.keras", monitor="loss", save_best_only=True),
        keras.callbacks.TerminateOnNaN(),
    ],
    ids=lambda c: type(c).__name__,
)
def test_callbacks_that_steer_by_a_training_metric_are_refused(callback):
    private = private_model()
    with pytest.raises(ValueError, match=type(callback).__name__):
        fit(private, [callback])
    assert private.ledger.steps == 0


@pytest.mark.representative(1)
@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss"),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate),
    ],
    ids=lambda c: type(c).__name__,
)
def test_callbacks_that_set_a_rate_that_follows_a_schedule_are_refused(callback):
    """Keras would raise only when they first act, after part of the budget is spent."""
    private = private_model(dp.ADADP(noise_multiplier=1.0))
    with pytest.raises(ValueError, match=rf"{type(callback).__name__}.*ADADP.*InverseSqrtDecay"):
        fit(private, [callback], validation_data=data())
    assert private.ledger.steps == 0
    with_number = private_model(dp.ADADP(0.1, noise_multiplier=1.0))
    fit(with_number, [callback], validation_data=data())
    assert with_number.ledger.steps == 3 * STEPS


def test_a_checkpoint_without_a_ledger_is_refused_before_training():
    private = private_model()
    with pytest.raises(ValueError, match=r"legacy \.h5 format"):
        fit(private, [keras.callbacks.ModelCheckpoint("m.h5")])
    assert private.ledger.steps == 0


@pytest.mark.extended
def test_a_budget_that_ends_training_says_so(capsys):
    x, y = data()
    callback = dp.PrivacyCallback(DELTA, max_epsilon=after(6))
    private_model().fit(x, y, batch_size=30, epochs=9, verbose=2, callbacks=[callback])
    said = f"ended after 6 steps at ε = {after(6):.6g}; more would exceed max_epsilon="
    assert said in capsys.readouterr().out
    private_model().fit(x, y, batch_size=30, epochs=1, verbose=2, callbacks=[callback])
    fit(private_model(), [callback], epochs=9)
    assert "max_epsilon" not in capsys.readouterr().out


def test_a_budget_too_small_for_one_step_says_what_one_costs():
    with pytest.raises(ValueError, match=rf"one more release makes it {after(1):.6g}.*multiplier"):
        fit(private_model(), [dp.PrivacyCallback(DELTA, max_epsilon=after(1) / 2)])


@pytest.mark.extended
@pytest.mark.parametrize("end", ["budget", "interrupt"])
def test_training_that_ends_inside_of_an_epoch_leaves_no_iterator(end):
    """It holds data, and a thread that draws lots, which at exit can wait for Python forever."""

    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    def iterators():
        return sum(isinstance(o, tf.data.Iterator) for o in gc.get_objects())

    gc.collect()
    before = iterators()
    if end == "budget":
        fit(private_model(), [dp.PrivacyCallback(DELTA, max_epsilon=after(5))], epochs=9)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            fit(private_model(), [Interrupts()])
        gc.collect()  # until the exception was handled its traceback had it
    assert iterators() == before


def test_callbacks_that_steer_by_a_validation_metric_work(tmp_path):
    x, y = data()
    fit(
        private_model(),
        [
            keras.callbacks.EarlyStopping(monitor="val_loss", restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(monitor="val_accuracy"),
            keras.callbacks.ModelCheckpoint(
                tmp_path / "m.keras", monitor="val_loss", save_best_only=True
            ),
        ],
        validation_data=(x, y),
    )
    assert dp.load_model(tmp_path / "m.keras").ledger.steps > 0


@pytest.mark.extended
def test_on_several_hosts_a_budget_counts_what_was_restored_after_it(tmp_path):
    before = private_model()
    fit(before, [], epochs=2)
    before.save_weights(tmp_path / "spent.weights.h5")
    privacy = dp.PrivacyCallback(DELTA, max_epsilon=after(2 * STEPS + 2))

    class RestoresAndShares(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.load_weights(tmp_path / "spent.weights.h5")
            privacy.share_budget(lambda value: value)

    private = private_model()
    fit(private, [privacy, RestoresAndShares()], epochs=9)
    assert 2 * STEPS <= private.ledger.steps <= 2 * STEPS + 2
    privacy = dp.PrivacyCallback(DELTA, max_epsilon=after(STEPS))
    with pytest.raises(ValueError, match="leaves no room"):
        fit(private_model(), [privacy, RestoresAndShares()])


def test_a_fit_that_an_earlier_budget_does_not_hold_warns():
    private = private_model()
    fit(private, [dp.PrivacyCallback(DELTA, max_epsilon=after(8))], epochs=1)
    fit(private, [dp.PrivacyCallback(DELTA, max_epsilon=after(8))], epochs=1)
    with pytest.warns(dp.PrivacyWarning, match=r"max_epsilon=[\d.]+\) to every fit"):
        fit(private, [dp.PrivacyCallback(DELTA)], epochs=1)
