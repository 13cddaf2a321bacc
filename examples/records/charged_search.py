"""Searches for a rate and a clip norm under a budget that covers the search.

A tenth of the training records is held out to score trials. Both parts stay within ε, for one
record that contributes nothing in its place (the number of records is public), at the number of
trials that `dp.tuning.search` keeps secret:

- a record that is trained on: σ* is the least at which all releases of a mean of m trials are
  within ε, by Papernot and Steinke (2022), Theorem 2.
- a record that is held out changes a trial by its score alone: the number n of held-out records
  that are classified correctly changes by 1 at most. The score is round(n + N(0, σ²)), one Gaussian
  release of a trial, and σ is the least at which the same theorem gives ε.

No record is in both parts, and the parts do not depend on what is in the records.
"""

import secrets

import record

import tf_adadp as dp


def searched(split, classifier, plan, epsilon, seed):
    """Returns the best model of a search within ε.

    Args:
        split: `record.Split` of features.
        classifier: shape of an example to a `DPModel`.
        plan: `linear.Searched`.
        epsilon: ε of the search at δ = plan.delta, by RDP.
        seed: of the records that are held out; trials have secret seeds.
    """
    parts = record.held_out(split, seed=1 + seed)
    law = dp.accounting.PoissonSampling(len(parts.y), plan.lot_size)
    sigma = noise_of_trials(law, plan.steps, plan, epsilon)
    score_law = dp.accounting.PoissonSampling(len(parts.y_test), len(parts.y_test))  # every record
    score_sigma = noise_of_trials(score_law, 1, plan, epsilon)

    def train(choice):
        model = classifier(parts.x.shape[1:])
        trial = plan.trial(**choice)
        record.fit(model, trial, parts, optimizer=trial.optimizer(noise_multiplier=sigma))
        return model

    def score(model):
        # By `predict`: `evaluate` would leave the raw count in the winner's metrics.
        found = model.predict(parts.x_test, batch_size=1000, verbose=0).argmax(axis=1)
        right = int((found == parts.y_test).sum())
        return noisy_share(right, len(parts.y_test), score_sigma)

    planned = dp.PrivacyLedger()
    noisy = f"a count + N(0, {score_sigma:.2f}²) keeps within the same epsilon"
    any_trial = plan.trial(plan.speeds[0], plan.clips[0])  # all cost the same
    any_trial.optimizer(noise_multiplier=sigma).charge(planned, law, plan.steps)
    best = dp.tuning.search(
        train,
        {"speed": plan.speeds, "l2_norm_clip": plan.clips},
        planned,
        mean_trials=plan.mean_trials,
        score=score,
        score_data=f"{len(parts.y_test)} held-out records, which {noisy}",
        target_epsilon=epsilon,
        target_delta=plan.delta,
    )
    print(f"found {best.hyperparameters}, score {best.score:.4f}")
    return best.model


def noise_of_trials(law, steps, plan, epsilon):
    """Returns the least σ at which a search over trials of `steps` releases is within ε."""

    def event(sigma):
        return dp.accounting.search_event(law.event(sigma), steps, plan.mean_trials)

    ledger = dp.PrivacyLedger()
    return ledger.calibrate_noise_multiplier(epsilon, plan.delta, law, steps=1, step=event)


def noisy_share(count, number, sigma):
    """Returns round(count + N(0, σ²)) of a number of records, as a share."""
    return round(count + secrets.SystemRandom().gauss(0, sigma)) / number
