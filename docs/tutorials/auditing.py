# %% [markdown]
# # Audit a model
#
# Accounting proves that ε is at most some number. An audit attacks the code, and proves that ε is at least some
# number, at a stated confidence. An audit above the claim refutes it: there is a bug, or the theory is wrong.
# An audit below the claim proves nothing more, since a better attack may exist.
#
# Everything in this tutorial reads raw data, and is **not private**. Keep the reports where the data are.

# %%
import keras
import matplotlib.pyplot as plt
import numpy as np

import tf_adadp as dp
from tf_adadp import accounting, audit

DELTA = 1e-5

# %% [markdown]
# ## Attack an optimizer
#
# `audit_optimizer` runs the optimizer many times on two neighbouring datasets. One of them has one gradient more,
# the canary. The attacker sees every release, and must tell the two apart.


# %%
def claimed_and_audited(optimizer, canary, draws):
    """Returns ε as charged for two steps on all records, and the lower bound of the attack."""
    optimizer.build([keras.Variable(np.zeros(3, "float32"))])
    ledger = accounting.PrivacyLedger()
    optimizer.charge(ledger, accounting.PoissonSampling(1, 1), 2)
    found = audit.audit_optimizer(
        optimizer, canary=[canary], steps=2, draws=draws, delta=DELTA, jit_compile=True
    )
    return ledger.epsilon(DELTA, "pld"), found


claim, honest = claimed_and_audited(
    dp.ADADP(noise_multiplier=1.5, warmup_steps=1), np.array([9.0, -5.0, 7.0]), draws=20_000
)
print(f"{honest.epsilon:.2f} <= epsilon <= {claim:.2f}")

# %% [markdown]
# If the releases are Gaussian, as they claim to be, the same scores prove more:

# %%
gaussian = audit.gaussian_epsilon_lower_bound(
    honest.scores, honest.neighbor_scores, delta=DELTA, confidence=0.999
)
print(f"{gaussian.epsilon:.2f} <= epsilon, for Gaussian releases")

# %% [markdown]
# ## Find a fault
#
# Here is an optimizer that draws 30 % less noise than it is charged for. It is the kind of bug that no unit test
# of the accounting can see.


# %%
class TooLittleNoise(dp.DPSGD):
    """Draws noise for 0.7 times the multiplier that its steps are charged for."""

    def event(self, law):
        return law.event(self.noise_multiplier / 0.7)


claim, faulty = claimed_and_audited(
    TooLittleNoise(1.0, noise_multiplier=1.05), np.array([9.0, -5.0, 7.0]), draws=20_000
)
gaussian = audit.gaussian_epsilon_lower_bound(
    faulty.scores, faulty.neighbor_scores, delta=DELTA, confidence=0.999
)
print(f"claimed {claim:.2f}, but epsilon >= {gaussian.epsilon:.2f}")

# %%
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
bins = np.linspace(-8, 8, 80)
axes.hist(np.clip(faulty.scores, -8, 8), bins, alpha=0.6, label="without the canary")
axes.hist(np.clip(faulty.neighbor_scores, -8, 8), bins, alpha=0.6, label="with the canary")
axes.set_xlabel("score of a run")
axes.legend()

# %% [markdown]
# ## Audit a whole training
#
# `OneRunAudit` adds canaries to the data, each by a secret coin. After training it guesses the coins from the
# losses. One training is enough. Use canaries that are no person's record.

# %%
rng = np.random.default_rng(0)


def random_records(number):
    """Returns records of 400 features with random labels: a model can only learn them by heart."""
    return rng.normal(size=(number, 400)).astype("float32"), rng.integers(0, 3, number)


x, y = random_records(300)
canaries = audit.OneRunAudit(*random_records(400))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model = dp.DPModel(keras.Sequential([keras.Input((400,)), keras.layers.Dense(3)]))
model.compile(dp.DPSGD(0.5, noise_multiplier=1.0), loss=loss, log_raw_metrics=False)
lots = canaries.lots(x, y, expected_size=200)
model.fit(lots, epochs=5, verbose=0, callbacks=[canaries])
bound = canaries.bound(delta=DELTA, claim=None)  # for any mechanism
print(f"{bound.epsilon:.2f} <= epsilon <= {model.epsilon(DELTA):.2f}")

# %% [markdown]
# ## Attack by membership inference
#
# The simplest attack calls a record a member of the training data if its loss is low. It works on a network that
# memorizes random labels, and fails on the private one.

# %%
all_x, all_y = (np.concatenate(pair) for pair in zip((x, y), random_records(300), strict=True))
members = np.arange(600) < 300


def network():
    layers = [keras.Input((400,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(3)]
    return keras.Sequential(layers)


plain = network()
plain.compile("adam", loss)
plain.fit(x, y, batch_size=32, epochs=20, verbose=0)

private = dp.DPModel(network())
private.compile(dp.ADADP(), loss, target_epsilon=2.0, target_delta=DELTA, log_raw_metrics=False)
private.fit(x, y, batch_size=100, epochs=20, verbose=0)

for name, trained in (("without privacy", plain), ("private", private)):
    report = audit.loss_attack(trained, all_x, all_y, members)
    print(f"{name}: area under the ROC curve {report.auc:.2f} (0.5 is guessing)")

# %% [markdown]
# An attack that fails is no proof of privacy. The proof is the accounting; the audit is a test of its code.
