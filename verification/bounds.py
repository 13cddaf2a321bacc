"""Do the accountants keep the laws they must, agree with integrals, and cost next to nothing?

    python -m verification.bounds                       # all parts, about half an hour
    python -m verification.bounds --parts=calibration,reading

Parts, one row each in the JSON:

invariants: ε on random lattices of noise multiplier, probability, steps and δ, 10^5 points in all,
    log-uniform. ε may not rise with noise or δ, nor fall with probability or steps; composing a
    run of two halves gives the run; Theorem 1 ≥ Wang's Theorem 27 ≥ Poisson RDP, Theorem 9 ≥
    Theorem 27. Reported are the worst relative violations, 0 where none.
pld: the same for "pld" on 300 random runs, each changed in one argument at a time, and ε by PLD
    over ε by RDP.
integrals: the Rényi divergence of a Poisson lot at 300 random (σ, q, α) against mpmath's integral
    at 30 digits, and how far Theorems 1, 9, 27 lie above it.
calibration: times of the searches, and how close to their targets they end.
reading: what charging and reading ε after each of 100,000 steps costs, beside the step itself.
"""

import itertools
import math
import time

import dp_accounting
import mpmath
import numpy as np
from dp_accounting import rdp

from benchmarks import harness
from tf_adadp import accounting

PARTS = ("invariants", "pld", "integrals", "calibration", "reading")
RENYI = ("rdp", "theorem1", "wang_theorem9", "wang_theorem27")
# What rounding may add to a violation; ε is read from logarithms of sums of up to 10^3 terms.
ROUNDING = 1e-8


def log_uniform(rng, low, high, size=None):
    """Numbers whose logarithm is uniform."""
    return np.exp(rng.uniform(math.log(low), math.log(high), size))


def lattice(rng, shape):
    """Rising values on each axis: σ in [0.4, 40], q in [1e-4, 0.9], T in [1, 1e5], δ."""
    sigmas, probabilities, steps, deltas = shape
    return (
        np.sort(log_uniform(rng, 0.4, 40, sigmas)),
        np.sort(log_uniform(rng, 1e-4, 0.9, probabilities)),
        np.unique(log_uniform(rng, 1, 1e5, steps).round().astype(int)),
        np.sort(log_uniform(rng, 1e-10, 1e-3, deltas)),
    )


def epsilons(axes, accountant):
    """ε at every point of a lattice, [σ, q, T, δ], read as users read it."""
    found = [
        accounting.epsilon(sigma, q, int(steps), delta, accountant)
        for sigma, q, steps, delta in itertools.product(*axes)
    ]
    return np.reshape(found, [len(axis) for axis in axes])


def rise(lower, upper):
    """The largest (lower − upper)/upper where lower exceeds upper, else 0."""
    lower, upper = np.asarray(lower), np.asarray(upper)
    above = lower > upper
    if not above.any():
        return 0.0
    return float(np.max((lower[above] - upper[above]) / np.maximum(upper[above], 1e-12)))


def violations(points, by_name):
    """Worst relative violations of monotonicity and order on one lattice of ε by accountant."""
    worst = {}
    for name, values in by_name.items():
        falling, rising = (0, 3), (1, 2)
        for axis in falling:
            after, before = np.delete(values, 0, axis), np.delete(values, -1, axis)
            worst[f"{name}, rises with {points[axis]}"] = rise(after, before)
        for axis in rising:
            after, before = np.delete(values, 0, axis), np.delete(values, -1, axis)
            worst[f"{name}, falls with {points[axis]}"] = rise(before, after)
    for lower, upper in (
        ("rdp", "wang_theorem27"),
        ("wang_theorem27", "wang_theorem9"),
        ("wang_theorem27", "theorem1"),
    ):
        worst[f"{lower} above {upper}"] = rise(by_name[lower], by_name[upper])
    return worst


def composition_error(rng, axes, accountant, samples):
    """Worst relative difference of a run and its two parts in one ledger."""
    worst = 0.0
    for _ in range(samples):
        sigma, q, steps, delta = (axis[rng.integers(len(axis))] for axis in axes)
        law = accounting.PoissonSampling(900, float(q * 900))
        first = int(rng.integers(1, steps)) if steps > 1 else 0
        ledger, other = accounting.PrivacyLedger(), accounting.PrivacyLedger()
        for count, target in ((first, other), (int(steps) - first, ledger)):
            if count:
                target.add(law.event(float(sigma)), count, law=law)
        ledger.merge(other)
        whole = accounting.epsilon(float(sigma), law.probability, int(steps), delta, accountant)
        parts = ledger.epsilon(float(delta), accountant)
        worst = max(worst, abs(parts - whole) / max(whole, 1e-12))
    return worst


def invariants(lattices, shape=(12, 12, 8, 6), seed=0):
    """Worst violations over several random lattices; see the module docstring."""
    rng = np.random.default_rng(seed)
    worst, points = {}, 0
    for _ in range(lattices):
        axes = lattice(rng, shape)
        by_name = {name: epsilons(axes, name) for name in RENYI}
        points += by_name["rdp"].size
        found = violations(("noise", "probability", "steps", "delta"), by_name)
        for name in RENYI:
            found[f"{name}, composition"] = composition_error(rng, axes, name, 20)
        worst = {key: max(value, worst.get(key, 0.0)) for key, value in found.items()}
    return {"points": points, "worst": worst}


def pld_invariants(runs, seed=1):
    """The same by privacy loss distributions; a change is 20 % of σ and q, and half the steps."""
    rng = np.random.default_rng(seed)
    worst = dict.fromkeys(("noise", "probability", "steps", "delta", "above rdp"), 0.0)
    ratios = []
    while len(ratios) < runs:
        sigma, q = float(log_uniform(rng, 1, 20)), float(log_uniform(rng, 1e-3, 0.3))
        steps, delta = int(log_uniform(rng, 2, 500)), float(log_uniform(rng, 1e-8, 1e-3))
        renyi = accounting.epsilon(sigma, q, steps, delta)
        if not 0.01 < renyi < 10:
            continue

        def pld(sigma=sigma, q=q, steps=steps, delta=delta):
            return accounting.epsilon(sigma, q, steps, delta, "pld")

        base = pld()
        found = {
            "noise": rise(pld(sigma=1.2 * sigma), base),
            "probability": rise(pld(q=q / 1.2), base),
            "steps": rise(pld(steps=steps // 2), base),
            "delta": rise(pld(delta=2 * delta), base),
            "above rdp": rise(base, renyi),
        }
        worst = {key: max(value, found[key]) for key, value in worst.items()}
        ratios.append(base / renyi)
    return {"points": runs, "worst": worst, "median pld / rdp": float(np.median(ratios))}


def divergence(sigma, q, order):
    """Rényi divergence of (1−q)N(0,σ²) + qN(1,σ²) from N(0,σ²), by an integral at 30 digits."""
    with mpmath.workdps(30):
        sigma, q, order = map(mpmath.mpf, (sigma, q, order))
        # The trapezoid rule: the integrand is analytic within πσ of the real line, its error falls
        # as e^{−2π²σ/h}.
        h = min(sigma, 1) / 12
        total = mpmath.mpf(0)
        for i in range(int(-14 / h), int((order / sigma + 14) / h) + 1):
            ratio = q * mpmath.expm1((2 * sigma * i * h - 1) / (2 * sigma**2))
            total += mpmath.npdf(i * h) * mpmath.expm1(order * mpmath.log1p(ratio))
        return float(mpmath.log1p(h * total) / (order - 1))


def integrals(points, seed=2):
    """Measures how far the RDP accountant lies from the integral, and the bounds from it.

    The accountant takes the logarithm of a number near 1, so that below 1e-6 its error is absolute.
    At fractional orders it adds the absolute values of an alternating series: an upper bound.
    """
    rng = np.random.default_rng(seed)
    orders = [a for a in rdp.RdpAccountant().orders if 1.3 <= a <= 64]
    errors = {"whole orders": [0.0], "fractional orders": [0.0], "below 1e-6, absolute": [0.0]}
    below = dict.fromkeys(("theorem1", "wang_theorem9", "wang_theorem27"), 0.0)
    left_out = 0
    for i in range(points):
        sigma, q = float(log_uniform(rng, 0.5, 20)), float(log_uniform(rng, 1e-4, 0.9))
        order = float(rng.choice([a for a in orders if (a % 1 == 0) == (i % 2 == 0)]))
        exact = divergence(sigma, q, order)
        event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        error = float(rdp.RdpAccountant([order]).compose(event).rdp[0]) - exact
        if error == math.inf:
            left_out += 1
            continue
        if exact < 1e-6:
            errors["below 1e-6, absolute"].append(error)
        else:
            errors["fractional orders" if order % 1 else "whole orders"].append(error / exact)
        if order < 2 or order % 1:
            continue
        bounds = {
            "theorem1": accounting.rdp_theorem1(sigma, q, order),
            "wang_theorem9": accounting.rdp_wang_theorem9(
                lambda j, sigma=sigma: j / (2 * sigma**2), q, order
            ),
            "wang_theorem27": accounting.rdp_wang_theorem27(sigma, q, order),
        }
        below = {name: max(below[name], rise(exact, bound)) for name, bound in bounds.items()}
    return {
        "points": points,
        "charged ∞, the series does not converge": left_out,
        "least error": {kind: min(found) for kind, found in errors.items()},
        "largest error": {kind: max(found) for kind, found in errors.items()},
        "bounds below the integral": below,
    }


def calibration():
    """Processor seconds of every search, and ε reached over its target."""
    q, steps, delta, found = 0.01, 1800, 1e-5, {}
    for accountant in accounting.ACCOUNTANTS:
        for target in (1.0, 4.0):
            for name, search, reached in (
                (
                    "noise",
                    lambda t, a: accounting.calibrate_noise_multiplier(t, delta, q, steps, a),
                    lambda x, a: accounting.epsilon(x, q, steps, delta, a),
                ),
                (
                    "probability",
                    lambda t, a: accounting.calibrate_sampling_probability(t, delta, 1, steps, a),
                    lambda x, a: accounting.epsilon(1, x, steps, delta, a),
                ),
                (
                    "steps",
                    lambda t, a: accounting.max_steps(1.1, q, t, delta, a),
                    lambda x, a: accounting.epsilon(1.1, q, x, delta, a),
                ),
            ):
                key = f"{name}, {accountant}, ε = {target:g}"
                begun = time.process_time()
                try:
                    answer = search(target, accountant)
                except ValueError as error:
                    found[key] = {"refused": str(error).split(":")[0]}
                    continue
                seconds = time.process_time() - begun
                if accountant in ("rdp", "pld") and seconds > {"rdp": 2, "pld": 20}[accountant]:
                    raise AssertionError(f"{key} took {seconds:.1f} s.")
                found[key] = {
                    "seconds": round(seconds, 3),
                    "reached": round(reached(answer, accountant) / target, 5),
                }
    return found


def reading(steps=100_000, trained=60):
    """Microseconds of charging and reading ε, and their share of a private step."""
    import keras

    import tf_adadp as dp
    from benchmarks import models  # TensorFlow, which nothing else here needs

    law = accounting.PoissonSampling(60000, 600)
    event, ledger = law.event(1.1), accounting.PrivacyLedger()
    ledger.add(event, law=law)
    ledger.epsilon(1e-5)  # fills the cache
    begun = time.process_time()
    for _ in range(steps):
        ledger.add(event, law=law)
        ledger.epsilon(1e-5)
    charged_and_read = (time.process_time() - begun) / steps
    found = {"steps": steps, "charging and reading, µs": round(1e6 * charged_and_read, 1)}
    for name, widths, lot in (
        ("MLP 784-1000-10, lot 600", (784, 1000, 10), 600),
        ("MLP 64-64-10, lot 128", (64, 64, 10), 128),
    ):
        x, y = models.random_data(20 * lot, models.Features((widths[0],)))
        model = dp.DPModel(models.mlp(*widths))
        model.compile(dp.DPSGD(1e-3, noise_multiplier=1.1), loss=models.loss())
        model.fit(x, y, batch_size=lot, steps_per_epoch=20, verbose=0)
        begun = time.perf_counter()
        model.fit(x, y, batch_size=lot, steps_per_epoch=trained, verbose=0)
        step = (time.perf_counter() - begun) / trained
        begun = time.perf_counter()
        for _ in range(1000):
            model.epsilon(1e-5)
        read = (time.perf_counter() - begun) / 1000
        found[name] = {
            "step, ms": round(1e3 * step, 2),
            "reading, µs": round(1e6 * read, 1),
            "reading / step": round(read / step, 5),
        }
        keras.backend.clear_session()
    return found


def main():
    parser = harness.resumable(__doc__, __file__)
    parser.add_argument("--parts", type=harness.names(PARTS), default=list(PARTS))
    parser.add_argument("--lattices", type=harness.count, default=16, help="of up to 6,912 points")
    parser.add_argument("--points", type=harness.count, default=300, help="for pld and integrals")
    args = parser.parse_args()
    results = harness.Results(args.out, key=("part",), one_machine=False, force=args.force)
    run = {
        "invariants": lambda: invariants(args.lattices),
        "pld": lambda: pld_invariants(args.points),
        "integrals": lambda: integrals(args.points),
        "calibration": calibration,
        "reading": reading,
    }
    for part in args.parts:
        begun = time.perf_counter()
        found = run[part]()
        seconds = round(time.perf_counter() - begun, 1)
        results.put({"part": part, "found": found, "seconds": seconds})
        print(part, found, flush=True)


if __name__ == "__main__":
    main()
