# %% [markdown]
# # Choose ε and read a statement
#
# This tutorial plans a training before it runs: how much noise a budget needs, what the lot size changes, how
# to divide a budget, and what an adversary could learn. It ends with a statement, read line by line. Nothing
# here needs TensorFlow, since `tf_adadp.accounting` does not import it.

# %%
import math

import matplotlib.pyplot as plt

from tf_adadp import accounting

RECORDS, DELTA = 60_000, 1e-6

# %% [markdown]
# ## What ε promises
#
# Imagine an adversary who knows every record but yours, and must guess from the trained model whether yours was
# in the training data. Without the model the guess is right half of the time. With it, the share of right
# guesses is at most (e^ε + δ)/(1 + e^ε), whatever the adversary computes.

# %%
for epsilon in (0.5, 1, 2, 4, 8):
    right = (math.exp(epsilon) + DELTA) / (1 + math.exp(epsilon))
    print(f"epsilon = {epsilon:3}: at most {right:.1%} right guesses")

# %% [markdown]
# An ε up to 1 is a strong guarantee by itself. From 1 to 10 it is a reasonable one, which other measures should
# support. δ must lie well below one over the number of records: a δ of 1/N would allow publishing one record.
#
# ## How much noise a budget needs
#
# `calibrate_noise_multiplier` finds the least noise for a target. Its unit is the clip norm: with a noise
# multiplier of 2, noise of twice the clip norm is added to the sum of a lot's clipped gradients.

# %%
lots = (64, 128, 256, 512, 1024, 2048, 4096)
per_record = []
for lot in lots:
    sigma = accounting.calibrate_noise_multiplier(
        target_epsilon=2.0, delta=DELTA, sampling_probability=lot / RECORDS, steps=1000
    )
    per_record.append(sigma / lot)
    print(f"lot of {lot:5}: noise multiplier {sigma:.3f}, {sigma / lot:.5f} per record")

figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
axes.loglog(lots, per_record, "o-")
axes.set_xlabel("expected lot size")
axes.set_ylabel("noise per record, σ*/L")
axes.grid(alpha=0.3)

# %% [markdown]
# The mean gradient of a lot has noise σ*/L. It falls with the lot size until it levels off. A lot beyond that
# point costs computation and buys nothing.
#
# ## How ε grows over a training

# %%
lot, sigma = 1024, 1.5
q = lot / RECORDS
for steps in (100, 500, 1000, 2000):
    rdp, pld = (accounting.epsilon(sigma, q, steps, DELTA, name) for name in ("rdp", "pld"))
    print(f"{steps:5} steps: epsilon = {rdp:.3f} by RDP, {pld:.3f} by PLD")

# %% [markdown]
# Both numbers are upper bounds on the same loss, so you may take the lower one. Privacy loss distributions
# (PLD) are tighter and slower to compute; Rényi differential privacy (RDP) is the default while training runs.
#
# ## Count everything that looks at the data
#
# Costs add up over all releases on the same records. A search over learning rates is such a release, even
# though only the best model is kept. So are runs that you throw away.

# %%
one = accounting.epsilon(sigma, q, 1000, DELTA)
ten = accounting.epsilon(sigma, q, 10 * 1000, DELTA)
print(f"one run: epsilon = {one:.2f}; ten runs, best one kept: epsilon = {ten:.2f}")

# %% [markdown]
# The optimizer `ADADP` needs no learning rate, so it needs no search. `dp.tuning.search` charges less than the
# sum where a search is unavoidable.
#
# ## Read the statement
#
# A ledger records every release. Here we write one by hand; `DPModel` does so for you.

# %%
ledger = accounting.PrivacyLedger()
law = accounting.PoissonSampling(num_examples=RECORDS, expected_size=lot)
ledger.add(law.event(sigma), 1000, law=law, origin="ADADP")
print(ledger.statement(DELTA))

# %% [markdown]
# - **Guarantee**: the two numbers. Quote them together, never ε alone.
# - **Unit of privacy**: whom the numbers protect. For a person with k records ε is up to k times as large, and δ
#   larger still.
# - **Neighbouring relation**: what "with or without you" means. Here one record is added or removed.
# - **Sampling**: the accounting is right for lots that were drawn this way, and for no others.
# - **Assumptions** and **Not covered**: what the numbers do not say. Validation data, raw training metrics and
#   other uses of the same records are the usual gaps.
