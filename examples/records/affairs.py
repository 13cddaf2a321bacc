"""A table: did a woman have an affair? A logistic regression on categories (see linear.py).

    pip install ".[records]" && python examples/records/affairs.py

The survey of 6,366 married women by the magazine Redbook, 1974 (Fair 1978), comes with the package
statsmodels (public domain). One woman is one record. All eight questions have a few answers, which
the questionnaire lists, so each answer is a feature of 0 or 1 and nothing is read off the table.
A fifth are test records.

The recipe is the first that was tried, and six others were no better in three folds of records that
are in part test records now.
"""

import linear
import record
from linear import Recipe

ANSWERS = {
    "rate_marriage": (1, 2, 3, 4, 5),
    "age": (17.5, 22, 27, 32, 37, 42),
    "yrs_married": (0.5, 2.5, 6, 9, 13, 16.5, 23),
    "children": (0, 1, 2, 3, 4, 5.5),
    "religious": (1, 2, 3, 4),
    "educ": (9, 12, 14, 16, 17, 20),
    "occupation": (1, 2, 3, 4, 5, 6),
    "occupation_husb": (1, 2, 3, 4, 5, 6),
}
RECIPES = {
    epsilon: Recipe(steps=200, learning_rate=20, lot_size=1024, pca_noise_multiplier=None)
    for epsilon in (1.0, 2.0, 3.0)
}


def load(data_dir=None):
    """Returns the answers as codes [n, 8], and whether there was an affair."""
    import numpy as np
    import pandas as pd

    table = pd.read_csv(record.package_folder("statsmodels") / "datasets" / "fair" / "fair.csv")
    x = table[list(ANSWERS)].to_numpy("float32")
    y = (table["affairs"] > 0).to_numpy("int32")
    test, train = np.split(np.random.default_rng(1974).permutation(len(y)), [len(y) // 5])
    return record.Split(x[train], y[train], x[test], y[test])


def features(x):
    """Returns 1 for each answer given, [n, 46]; an answer that is not listed has none."""
    import numpy as np

    columns = [x[:, i, None] == np.array(answers) for i, answers in enumerate(ANSWERS.values())]
    return np.concatenate(columns, axis=1).astype("float32")


def prepare(table):
    """Returns a trainer on the answers."""
    return linear.trainer(table.map(features), classes=2)


def _logistic_regression(table):
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=1000).fit(features(table.x), table.y)
    return model.score(features(table.x_test), table.y_test)


def _trees(table):
    from sklearn.ensemble import HistGradientBoostingClassifier

    model = HistGradientBoostingClassifier(max_iter=40, random_state=0).fit(table.x, table.y)
    return model.score(table.x_test, table.y_test)


def _more_frequent(table):
    import numpy as np

    return np.mean(table.y_test == np.bincount(table.y).argmax())


BASELINES = {
    "logistic regression": _logistic_regression,
    "gradient-boosted trees": _trees,
    "the more frequent class": _more_frequent,
}

if __name__ == "__main__":
    record.run("affairs", record.Task(load, prepare, RECIPES, linear.unchosen(RECIPES), BASELINES))
