"""Attacks on every mechanism: measured lower bounds on ε beside what is claimed.

    python -m verification.audits                                # all, about an hour on one core
    python -m verification.audits --mechanism=DPSGD --draws=1000000

Each mechanism is set up to cost ε = 1 and ε = 4 at δ = 1e-5 in one to three steps that see the
whole data set (q = 1; one case samples), and is run many times on two data sets that differ in one
adversarial example. `tf_adadp.audit` turns what an attacker scores into lower bounds at 99.9 %
confidence: the chance that any one sound row lies above its claim by bad luck is below 1e-3.

- "at least": `epsilon_lower_bound`, for any mechanism;
- "law assumed": for mechanisms whose trade-off function is known up to the noise,
  `gaussian_epsilon_lower_bound` where all releases are Gaussian ones on all records, and
  `law_epsilon_lower_bound` where lots are sampled. AGD and the printed forms have no such bound.

"claim" comes from a `PrivacyLedger` that was charged by the optimizer (privacy loss distributions),
for AGD from its budget, and for printed forms, which the ledger charges ∞, is what their papers
say: the same noise charged as DP-SGD, or SADPSGD's `epsilon_as_published`.

Faulty rows are DP-SGD with less noise than it is charged for. Only the second bound sees them.

The pairs that expose the printed forms:

- ADADP, prior="raw": a coordinate of the gradient is 0 on D and not on D'. From the second step on
  its noise on D has scale 0, so the coordinate is released as exactly 0.
- SADPSGD charged by accepted steps: energy rejects candidates below a threshold t, and the example
  moves candidates by one clip norm; what is released was rejected many times over on D, and hardly
  ever on D'. See examples/experiments/accept_only.py.
- AGD, variant="printed": one example raises the score of the first of 21 candidates; its noise, of
  the wrong sign, answers with 20 times the ε it was given. See examples/experiments/noisy_min.py.
- DPOPT, variant="printed": an example along a coordinate that matters little, where the noise is
  least.

Resumable: mechanisms whose row is in the JSON are not run again.
"""

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

import tf_adadp as dp
from benchmarks import harness
from tf_adadp import accounting, audit, gradients

DELTA, CONFIDENCE = 1e-5, 0.999
EPSILONS = (1.0, 4.0)
LAW = accounting.PoissonSampling(num_examples=1, expected_size=1)  # q = 1
ROWS, STEPS = 10, 3
CANARY = np.array([30.0, -50, 20, 80, -40, 30, -60, 50, 70, -20], np.float32)


def variables(size=ROWS):
    """One trainable Keras variable, zeros."""
    return [keras.Variable(np.zeros(size, np.float32), trainable=True, name="weights")]


def linear_model(loss):
    """One weight w = 0, output w·x, and the engine that takes gradients of the loss."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(loss=loss)
    model.evaluate(np.ones((1, 1)), np.ones((1, 1)), verbose=0)  # builds the loss
    spec = (tf.TensorSpec((None, 1)), tf.TensorSpec((None, 1)), None)
    engine, _ = gradients.make_engine(
        model, model._compile_loss, element_spec=spec, gradient_engine="vectorized",
        jit_compile=False,
    )  # fmt: skip
    return model, engine


def one_example_lot(x, neighbor):
    """A lot that holds the example x on D', and nothing on D."""
    x = tf.constant([[[x]]], tf.float32)
    return (x, tf.zeros_like(x), None), tf.reshape(neighbor, [1, 1])


def claim_of(optimizer, law, steps):
    """ε of so many steps, by the ledger."""
    ledger = accounting.PrivacyLedger()
    optimizer.charge(ledger, law, steps)
    return ledger.epsilon(DELTA, "pld")


class Charged:
    """An optimizer whose releases are the Gaussian mechanisms that it is charged for.

    The others are 3 examples, so that sums, centres and priors have something to follow. A faulty
    one has `noise` times the noise that it is charged for.
    """

    def __init__(self, make, steps=STEPS, q=1.0, noise=1.0):
        self.make, self.steps, self.q, self.noise = make, steps, q, noise

    def sigma(self, target):
        """The noise multiplier that costs `target`."""
        return accounting.calibrate_noise_multiplier(target, DELTA, self.q, self.steps, "pld")

    def event(self, target):
        """Returns the ledger of what a run is charged."""
        law = accounting.PoissonSampling(1000, 1000 * self.q)
        return dp_accounting.SelfComposedDpEvent(law.event(self.sigma(target)), self.steps)

    def __call__(self, target, draws, seed=None):
        """(claim, scores, neighbor scores)."""
        law = accounting.PoissonSampling(1000, 1000 * self.q)
        sigma = self.sigma(target)
        optimizer = self.make(noise_multiplier=self.noise * sigma)
        if not optimizer.built:
            optimizer.build(variables())
        size = sum(int(np.prod(v.shape)) for v in optimizer._trainable_variables)
        canary = np.resize(CANARY, size).reshape(optimizer._trainable_variables[0].shape)
        others = np.stack([0.01 * canary, -0.03 * canary, 0.02 * np.abs(canary)])
        result = audit.audit_optimizer(
            optimizer,
            [canary],
            gradients=[others],
            steps=self.steps,
            sampling_probability=self.q,
            draws=draws,
            delta=DELTA,
            seed=seed,
            jit_compile=True,
        )
        charged = optimizer if self.noise == 1 else self.make(noise_multiplier=sigma)
        return claim_of(charged, law, self.steps), result.scores, result.neighbor_scores


def annealed(noise_multiplier):
    """SADPSGD with public energy, by which about half of the candidates are rejected."""
    model, _ = linear_model("mse")
    optimizer = dp.SADPSGD(
        noise_multiplier=noise_multiplier, energy_data=(np.ones((4, 1)), np.zeros((4, 1)))
    )
    optimizer.build(model.trainable_variables)
    optimizer.bind(model, "mse")
    return optimizer


def budgeted_directions(target, draws, seed=None):
    """DPOPT(directions="budgeted"): two releases on one lot, both scored."""
    total = accounting.calibrate_noise_multiplier(target, DELTA, 1.0, 1, "pld")
    sigma = sigma_w = total * np.sqrt(2)
    model, engine = linear_model(lambda y, p: p[:, 0])
    optimizer = dp.DPOPT(
        noise_multiplier=sigma, directions="budgeted", direction_noise_multiplier=sigma_w
    )
    optimizer.build(model.trainable_variables)

    def run(neighbor):
        with audit.recorded_releases(optimizer) as releases:
            optimizer.step_on_lot(engine, one_example_lot(1e3, neighbor), 1.0)
        (((released,), (stddev,)),) = releases
        total = 0.0
        for value, std, multiplier in (
            (released, stddev, sigma),
            (optimizer._direction[0].value, tf.constant(sigma_w, tf.float32), sigma_w),
        ):
            u = std / multiplier  # one weight: the gradient 1000 is clipped to the edge of the set
            total += tf.reduce_sum((value * u - u * u / 2) / std**2)
        return total

    pair = audit.draw_scores(optimizer, run, draws, seed=seed, jit_compile=True)
    return claim_of(optimizer, LAW, 1), *pair


def _agd(loss, target, draws, seed, variant, score):
    """One round of AGD, gradient and choice, whose budget is all that there is."""
    model, engine = linear_model(loss)
    optimizer = dp.AGD(
        total_epsilon=target, total_delta=DELTA, splits=1, loss_clip=1.0, l2_norm_clip=1.0,
        variant=variant,
    )  # fmt: skip
    optimizer.build(model.trainable_variables)
    optimizer.begin(LAW, None, 1)

    def run(neighbor):
        lot = one_example_lot(1e6, neighbor)
        optimizer.step_on_lot(engine, lot, 1.0)
        optimizer.step_on_lot(engine, lot, 1.0)
        return score(optimizer)

    pair = audit.draw_scores(optimizer, run, draws, seed=seed, jit_compile=True)
    return optimizer.total_epsilon, *pair


def agd(target, draws, seed=None):
    """AGD against the log-ratio of gradient and choice together.

    The example's loss is 1 where the weight is 0 or negative, and 0 at all positive candidates.
    """

    def score(optimizer):
        s = tf.reduce_sum(optimizer._direction[0].value)
        variance = tf.cast(0.5 / optimizer._gradient_budget.value, tf.float32)
        epsilon = tf.cast(optimizer._selection_epsilon.value, tf.float32)
        k = optimizer.num_candidates
        stays = tf.where(optimizer._step_size.value > 0, 0.0, -epsilon)
        choice = tf.where(s < 0, stays + np.log(k) - tf.math.log(k - 1 + tf.exp(-epsilon)), 0.0)
        return (-s - 0.5) / variance + choice  # the gradient is −10⁶, clipped to −1

    hinge = lambda y, p: tf.nn.relu(1.0 - p[:, 0])  # noqa: E731
    return _agd(hinge, target, draws, seed, "sound", score)


def agd_printed(target, draws, seed=None):
    """AGD with noise of the wrong sign: how often it stays where it is.

    The example's loss is 1 at the weight 0, and 0 at all other candidates.
    """
    bump = lambda y, p: tf.nn.relu(1.0 - tf.abs(p[:, 0]))  # noqa: E731
    return _agd(bump, target, draws, seed, "printed", lambda o: -o._step_size.value)


def adadp_raw(target, draws, seed=None):
    """ADADP(prior="raw"): the size of the second release along a coordinate that D does not have.

    The claim is that of two steps of DP-SGD.
    """
    sigma = accounting.calibrate_noise_multiplier(target, DELTA, 1.0, 2, "pld")
    optimizer = dp.ADADP(
        noise_multiplier=sigma, prior="raw", clipping="local", warmup_steps=1, l2_norm_clip=1.0
    )
    optimizer.build(variables(3))
    rows = [tf.constant([[0.3, 0.2, 0.0], [0.1, -0.1, 0.5]])]

    def run(neighbor):
        mask = tf.stack([1.0, neighbor])
        for _ in range(2):
            sums = optimizer.clipping_set().clipped_sum(rows, mask)
            with audit.recorded_releases(optimizer) as releases:
                optimizer.apply_private(sums, 1.0)
        ((released,), _) = releases[0]
        return -tf.abs(released[2])

    pair = audit.draw_scores(optimizer, run, draws, seed=seed, jit_compile=True)
    return accounting.epsilon(sigma, 1.0, 2, DELTA, "pld"), *pair


def sadpsgd_accepted_only(target, draws, seed=None):
    """SADPSGD until one candidate is accepted; the claim is the paper's, for one accepted step.

    It begins at τ = 1, as after a first accepted step on public data: at τ = 0 the second candidate
    is kept whatever its energy.
    """
    sigma = accounting.calibrate_noise_multiplier(target, DELTA, 1.0, 1, "pld")
    patience = 100 if target < 2 else 30
    least = sigma * (1.9 if target < 2 else 1.3)

    def loss(y, p):  # low at the weight 0 that training begins with, and from `least` on
        return tf.where((p[:, 0] >= least) | (p[:, 0] == 0), 0.0, 1e6)

    model, _ = linear_model(loss)
    optimizer = dp.SADPSGD(
        noise_multiplier=sigma, rejection_threshold=patience,
        energy_data=(np.ones((1, 1)), np.zeros((1, 1))),
    )  # fmt: skip
    optimizer.build(model.trainable_variables)
    optimizer.bind(model, loss)
    optimizer.accepted.assign(1)
    optimizer.iterations.assign(1)
    (weight,) = model.trainable_variables

    def run(neighbor):
        def candidate(i):
            optimizer.apply_private([tf.fill([1, 1], -neighbor)], 1.0)
            return i + 1

        tf.while_loop(lambda i: optimizer.accepted.value < 2, candidate, [tf.constant(0)])
        return -tf.reduce_sum(weight.value)

    pair = audit.draw_scores(optimizer, run, draws, seed=seed, jit_compile=True)
    return optimizer.epsilon_as_published(LAW, DELTA), *pair


def dpopt_printed(target, draws, seed=None):
    """DPOPT(variant="printed"); the claim is DP-SGD's."""
    size = 100
    sigma = accounting.calibrate_noise_multiplier(target, DELTA, 1.0, 1, "pld")
    directions = np.full(size, 1e-3)
    directions[0] = 1.0
    optimizer = dp.DPOPT(noise_multiplier=sigma, directions=[directions], variant="printed")
    optimizer.build(variables(size))
    canary = np.zeros(size)
    canary[1] = 100.0
    result = audit.audit_optimizer(
        optimizer, [canary], draws=draws, delta=DELTA, seed=seed, jit_compile=True
    )
    claim = accounting.epsilon(sigma, 1.0, 1, DELTA, "pld")
    return claim, result.scores, result.neighbor_scores


def dppca(target, draws, seed=None):
    """DPPCA of one feature: the noisy eigenvalue, through `fit`."""
    sigma = accounting.calibrate_noise_multiplier(target, DELTA, 1.0, 1, "pld")
    fits = min(draws, 50_000)  # not in a graph: 0.1 ms each
    pca = dp.DPPCA(1, noise_multiplier=sigma, seed=seed)
    pair = []
    for x in (np.zeros((1, 1)), np.ones((1, 1))):
        pair.append(np.array([pca.fit(x).explained_variance_[0] for _ in range(fits)]))
    one = dp.DPPCA(1, noise_multiplier=sigma)
    one.charge(one.ledger)
    return one.ledger.epsilon(DELTA, "pld"), *pair


_DIRECTIONS = [np.linspace(0.1, 1, ROWS).astype(np.float32)]
SOUND = {
    "DPSGD": Charged(dp.DPSGD, steps=1),
    "DPSGD, q = 0.1, 4 steps": Charged(dp.DPSGD, steps=4, q=0.1),
    "DPAdam": Charged(dp.DPAdam),
    "DPRMSprop (ADAL)": Charged(dp.DPRMSprop),
    "ADADP": Charged(lambda **k: dp.ADADP(warmup_steps=1, **k)),
    "ADADP, local": Charged(lambda **k: dp.ADADP(clipping="local", warmup_steps=1, **k)),
    "ADAN": Charged(lambda **k: dp.ADAN(warmup_steps=1, **k)),
    "AdaCliP": Charged(lambda **k: dp.AdaCliP(center_decay=0.5, **k)),
    "DPOPT, released": Charged(lambda **k: dp.DPOPT(direction_decay=0.5, **k)),
    "DPOPT, released, local": Charged(
        lambda **k: dp.DPOPT(direction_decay=0.5, clipping="local", **k)
    ),
    "DPOPT, uniform": Charged(lambda **k: dp.DPOPT(directions="uniform", **k)),
    "DPOPT, public": Charged(lambda **k: dp.DPOPT(directions=_DIRECTIONS, **k)),
    "DPOPT, budgeted": budgeted_directions,
    "AutoSGD": Charged(dp.AutoSGD),
    "SADPSGD": Charged(annealed),
    "AGD": agd,
    "DPPCA": dppca,
}
FAULTY = {
    "DPSGD, noise x 0.9": Charged(dp.DPSGD, steps=1, noise=0.9),
    "DPSGD, q = 0.1, 4 steps, noise x 0.8": Charged(dp.DPSGD, steps=4, q=0.1, noise=0.8),
}
PRINTED = {
    "ADADP, prior=raw": adadp_raw,
    "SADPSGD, accepted steps only": sadpsgd_accepted_only,
    "AGD, printed": agd_printed,
    "DPOPT, printed": dpopt_printed,
}
MECHANISMS = {**SOUND, **FAULTY, **PRINTED}


def assumed_bound(name, target, scores, neighbor_scores):
    """(what is assumed, the bound), (None, None) where no trade-off function is known."""
    if name == "AGD" or name in PRINTED:
        return None, None
    pair, at = (scores, neighbor_scores), (DELTA, CONFIDENCE)
    if getattr(MECHANISMS[name], "q", 1) < 1:
        event = MECHANISMS[name].event(target)
        return "claimed law", audit.law_epsilon_lower_bound(*pair, event, *at)
    return "Gaussian", audit.gaussian_epsilon_lower_bound(*pair, *at)


def measure(name, target, draws, seed=None):
    """One row of the results."""
    start = time.time()
    claim, scores, neighbors = MECHANISMS[name](target, draws, seed)
    bound = audit.epsilon_lower_bound(scores, neighbors, DELTA, CONFIDENCE)
    assumption, assumed = assumed_bound(name, target, scores, neighbors)
    return {
        "mechanism": name,
        "target": target,
        "printed": name in PRINTED,
        "claim": round(claim, 4),
        "lower_bound": round(bound.epsilon, 4),
        "draws": len(scores),
        "event": bound.event,
        "frequent": list(bound.frequent),
        "rare": list(bound.rare),
        "assumption": assumption,
        "assumed_bound": assumed and round(assumed.epsilon, 4),
        "assumed_event": assumed and assumed.event,
        "assumed_frequent": assumed and list(assumed.frequent),
        "assumed_rare": assumed and list(assumed.rare),
        "estimate": None
        if name in PRINTED
        else round(audit.gaussian_epsilon_estimate(scores, neighbors, DELTA), 4),
        "seconds": round(time.time() - start, 1),
    }


def table(rows):
    """The rows as Markdown, one line per mechanism."""
    columns = {"claim": "claim", "lower_bound": "at least", "assumed_bound": "law assumed"}
    lines = []
    for name in MECHANISMS:
        cells = []
        for target in EPSILONS:
            chosen = [r for r in rows if (r["mechanism"], r["target"]) == (name, target)]
            row = chosen[0] if chosen else {}
            cells += ["" if row.get(c) is None else f"{row[c]:.2f}" for c in columns]
        if any(cells):
            lines.append([name, *cells])
    header = ["mechanism", *(len(EPSILONS) * [*columns.values()])]
    return harness.markdown_table(header, lines)


def draw_figure(rows, path):
    """Bounds beside claims; printed and faulty forms in red."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    for axes, target in zip(figure.subplots(1, 2, sharey=True), EPSILONS, strict=True):
        chosen = [r for r in rows if r["target"] == target]
        chosen.sort(key=lambda r: list(MECHANISMS).index(r["mechanism"]))
        names = [r["mechanism"] for r in chosen]
        colors = [
            "tab:red" if r["mechanism"] in (*FAULTY, *PRINTED) else "tab:blue" for r in chosen
        ]
        axes.barh(names, [r["lower_bound"] for r in chosen], color=colors, label="lower bound")
        axes.plot([r["claim"] for r in chosen], names, "k|", markersize=12, label="claim")
        assumed = {r["mechanism"]: r["assumed_bound"] for r in chosen if r.get("assumed_bound")}
        axes.plot(
            assumed.values(), assumed.keys(), "kx", markersize=5, label="lower bound, law assumed"
        )
        axes.set(xlabel="ε at δ = 1e-5", title=f"set up for ε = {target:g}")
        axes.invert_yaxis()
        axes.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = harness.resumable(__doc__, __file__)
    parser.add_argument("--mechanism", choices=list(MECHANISMS), action="append", help="repeat it")
    parser.add_argument("--draws", type=int, default=300_000, help="runs on each data set")
    args = parser.parse_args()
    results = harness.Results(
        args.out, ("mechanism", "target"), one_machine=False, force=args.force
    )
    for name in args.mechanism or MECHANISMS:
        for target in EPSILONS:
            if results.find(mechanism=name, target=target) is None:
                row = measure(name, target, args.draws)
                results.put(row)
                bounds = f"at least {row['lower_bound']}, law assumed {row['assumed_bound']}"
                print(f"{name}: claim {row['claim']}, {bounds}", flush=True)
    print(table(results.rows))
    draw_figure(results.rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
