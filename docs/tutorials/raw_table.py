# %% [markdown]
# # Train on a raw table
#
# A table has columns of different units, categories, missing values, and often several rows of one person.
# This tutorial prepares such a table without looking at it, and protects persons instead of rows.
#
# The table is the RAND Health Insurance Experiment, which statsmodels ships (public domain): 20,190 years of
# 5,912 people. The task: did the person see a doctor at least twice in that year?

# %%
import importlib.resources

import keras
import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier

import tf_adadp as dp

path = importlib.resources.files("statsmodels.datasets.randhie") / "src" / "randhie.csv"
table = pd.read_csv(path)
table[["zper", "year", "site", "coins", "xage", "female", "ghindx", "linc", "mdvis"]].head()

# %% [markdown]
# `zper` is the person, `mdvis` the number of visits, `site` one of six cities, `ghindx` a health index that is
# missing for a quarter of the rows.
#
# ## Scale by public bounds
#
# Means, standard deviations, quantiles and vocabularies of the private rows are statistics without noise. So
# each column is scaled by bounds that are known without the table: an age, an index from 0 to 100, the design
# of the experiment. Values outside of them are clipped. A missing value becomes 0 beside an indicator column.

# %%
BOUNDS = {
    "coins": (0, 100),  # the share of the costs that the family pays, %
    "xage": (0, 65),
    "female": (0, 1),
    "black": (0, 1),
    "educdec": (0, 25),  # years of school
    "linc": (0, 11),  # logarithm of the income
    "lfam": (0, 3),  # logarithm of the family's size
    "physlm": (0, 1),
    "disea": (0, 60),  # number of chronic conditions, as an index
    "mhi": (0, 100),
    "ghindx": (0, 100),
    "year": (1, 5),
}
SITES, PLANS = 6, 19

low, high = (np.array(bounds, "float32") for bounds in zip(*BOUNDS.values(), strict=True))
raw = table[list(BOUNDS)].to_numpy("float32")
missing = np.isnan(raw)
scaled = np.clip(2 * (raw - low) / (high - low) - 1, -1, 1)
x = {
    "numbers": np.concatenate([np.where(missing, 0, scaled), missing], axis=1).astype("float32"),
    "site": table["site"].to_numpy("int32") - 1,
    "plan": table["plan"].to_numpy("int32") - 1,
}
y = (table["mdvis"] >= 2).to_numpy("int32")
persons = table["zper"].to_numpy()

# %% [markdown]
# ## Split by person
#
# All rows of a person go to one side. Otherwise the test would ask about people whom the model has seen.

# %%
order = np.random.default_rng(0).permutation(np.unique(persons))
tested = np.isin(persons, order[: len(order) // 5])


def rows(chosen):
    return {name: column[chosen] for name, column in x.items()}


print(f"{(~tested).sum()} rows of {len(order) - len(order) // 5} people to train on")

# %% [markdown]
# ## A network with embedded categories
#
# Categories are numbered by a public list (here: the design has 6 sites and 19 plans).


# %%
def network():
    numbers = keras.Input((2 * len(BOUNDS),), name="numbers")
    site, plan = (keras.Input((), dtype="int32", name=name) for name in ("site", "plan"))
    features = keras.layers.Concatenate()(
        [numbers, keras.layers.Embedding(SITES, 4)(site), keras.layers.Embedding(PLANS, 4)(plan)]
    )
    hidden = keras.layers.Dense(32, activation="relu")(features)
    output = keras.layers.Dense(1, activation="sigmoid")(hidden)
    return keras.Model({"numbers": numbers, "site": site, "plan": plan}, output)


# %% [markdown]
# ## Protect a person, not a row
#
# A person has up to five rows. `UserLots` draws persons instead of rows, and clips all that a person adds to a
# lot together. Neighbouring datasets then differ by one person with all rows.

# %%
lots = dp.UserLots(
    rows(~tested),
    y[~tested],
    user_ids=persons[~tested],
    expected_users=512,
    max_records_per_user=1,
    expected_size=512,
)
model = dp.DPModel(network())
model.compile(
    dp.ADADP(),
    loss="binary_crossentropy",
    metrics=["accuracy"],
    log_raw_metrics=False,
    target_epsilon=1.0,
    target_delta=1e-5,
)
model.fit(lots, epochs=20, verbose=0)
private_accuracy = model.evaluate(rows(tested), y[tested], verbose=0, return_dict=True)["accuracy"]
print(f"private: {private_accuracy:.1%} at epsilon = {model.epsilon(1e-5):.2f} for one person")

# %%
for line in model.ledger.statement(delta=1e-5).splitlines():
    if line.startswith(("Guarantee", "Unit", "Neighbouring")):
        print(line)

# %% [markdown]
# ## Compare with models without privacy

# %%
plain = network()
plain.compile("adam", "binary_crossentropy", metrics=["accuracy"])
plain.fit(rows(~tested), y[~tested], batch_size=512, epochs=10, verbose=0)
plain_accuracy = plain.evaluate(rows(tested), y[tested], verbose=0)[1]
trees = HistGradientBoostingClassifier(max_iter=40, random_state=0)
trees.fit(raw[~tested], y[~tested])
majority = max(y[tested].mean(), 1 - y[tested].mean())
print(f"the same network without privacy: {plain_accuracy:.1%}")
print(f"gradient-boosted trees without privacy: {trees.score(raw[tested], y[tested]):.1%}")
print(f"the more frequent class: {majority:.1%}")

# %% [markdown]
# A split by person, bounds from the design, one budget: these are the three decisions that make the number ε
# mean something here. What each of them costs on this table is on the page about choosing ε.
