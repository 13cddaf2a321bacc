"""Membership inference and one-run audits of whole trainings on scikit-learn's digits.

    python -m verification.memberships            # some ten minutes on one core, no download

An MLP 64-128-10 learns half of 600 digits, once without privacy and once by DP-SGD at ε = 4
(δ = 1e-4, Poisson lots). Each record is in by a fair coin. The attacks are the loss threshold and
LiRA (online, 8 shadow models); their scores give lower bounds on ε by the theorem for one run. A
third audit trains on all digits with 300 canaries, uniform noise with random labels.

Bounds are at 95 %: "lower_bound" by Steinke's theorem, "assumed_bound" by `one_run_bound` with a
claim. That is the ledger's law; without privacy a Gaussian one, which nothing vouches for there. A
fifth of the labels of the 600 are wrong, so that there is something to remember. Nothing here is
private. Resumable: what has a row in the JSON is not run again.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

import tf_adadp as dp
from benchmarks import harness, models
from tf_adadp import accounting, audit

DELTA, EPSILON = 1e-4, 4.0
RECORDS, CANARIES, LOT, STEPS = 600, 300, 150, 200
METHODS = ("none", "DPSGD")


def records():
    """600 digits, a fifth of them with a random label."""
    x, y, _, _ = models.digits()
    rng = np.random.default_rng(0)
    x, y = x[:RECORDS], y[:RECORDS].astype(np.int32)
    wrong = rng.random(RECORDS) < 0.2
    return x, np.where(wrong, rng.integers(0, 10, RECORDS), y).astype(np.int32)


def private_model(num_examples):
    """A compiled `DPModel` whose 200 steps on that many places cost ε = 4."""
    sigma = accounting.calibrate_noise_multiplier(EPSILON, DELTA, LOT / num_examples, STEPS)
    model = dp.DPModel(models.mlp(64, 128, 10))
    model.compile(dp.DPSGD(1.0, noise_multiplier=sigma), loss=models.loss(), jit_compile=False)
    return model


def train(method, x, y, present):
    """A model trained on the records that are present."""
    if method == "none":
        model = models.mlp(64, 128, 10)
        model.compile(keras.optimizers.Adam(0.003), loss=models.loss())
        model.fit(x[present], y[present], batch_size=50, epochs=60, verbose=0)
        return model
    model = private_model(len(x))
    lots = dp.PoissonLots(x, y, LOT, present=present)
    model.fit(lots, epochs=1, steps_per_epoch=STEPS, verbose=0)
    return model


def membership(method, seed):
    """Reports of the loss threshold and of LiRA on one target, its ε, and the law to assume."""
    keras.utils.set_random_seed(seed)
    x, y = records()
    report, target = audit.lira(lambda present: train(method, x, y, present), x, y, seed=seed)
    simple = audit.loss_attack(target, x, y, report.members, fair_coins=True)
    if isinstance(target, dp.DPModel):
        return [simple, report], target.epsilon(DELTA), target.ledger
    return [simple, report], None, "gaussian"


def bound_fields(bound, assumed):
    """Returns what a row says of two `OneRunBound`s."""
    return {
        "correct": f"{bound.correct} of {bound.guesses}",
        "lower_bound": round(bound.epsilon, 4),
        "assumed_correct": f"{assumed.correct} of {assumed.guesses}",
        "assumed_method": assumed.method,
        "assumed_bound": round(assumed.epsilon, 4),
    }


def one_run(seed):
    """Two `OneRunBound`s of a private training with canaries, without and with a law, and its ε."""
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    x, y, _, _ = models.digits()
    canaries = audit.OneRunAudit(
        rng.random((CANARIES, 64), dtype=np.float32), rng.integers(0, 10, CANARIES)
    )
    lots = canaries.lots(x, y, expected_size=LOT)
    model = private_model(lots.num_examples)
    model.fit(lots, epochs=1, steps_per_epoch=STEPS, verbose=0, callbacks=[canaries])
    return canaries.bound(DELTA, claim=None), canaries.bound(DELTA), model.epsilon(DELTA)


def main():
    parser = harness.resumable(__doc__, __file__)
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and coins")
    args = parser.parse_args()
    results = harness.Results(args.out, ("training", "attack"), one_machine=False, force=args.force)

    def put(**row):
        results.put(row)
        print(row, flush=True)

    for method in METHODS:
        if results.find(training=method):
            continue
        reports, claim, law = membership(method, args.seed)
        for report in reports:
            put(
                training=method,
                attack=report.name,
                claim=claim,
                auc=round(report.auc, 4),
                tpr_at_fpr_0_01=round(report.tpr_at(0.01), 4),
                **bound_fields(
                    report.epsilon_lower_bound(DELTA), report.epsilon_lower_bound(DELTA, claim=law)
                ),
            )
    if not results.find(attack="one run, canaries"):
        bound, assumed, claim = one_run(args.seed)
        put(
            training="DPSGD, canaries",
            attack="one run, canaries",
            claim=claim,
            **bound_fields(bound, assumed),
        )


if __name__ == "__main__":
    main()
