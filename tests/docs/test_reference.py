"""The reference has every public name, once."""

import importlib
import inspect
import pathlib
import re

import tf_adadp

API = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "api"
MODULES = ("accounting", "audit", "tuning", "priors")


def public_names():
    """Yields the shortest path of every public name; a module stands for itself or its names."""
    seen = set()
    for name in tf_adadp.__all__:
        if name not in MODULES:
            seen.add(id(getattr(tf_adadp, name)))
            yield f"tf_adadp.{name}"
    for module in MODULES:
        where = getattr(tf_adadp, module)
        for name in where.__all__:
            if id(getattr(where, name)) not in seen:
                yield f"tf_adadp.{module}.{name}"


def test_every_public_name_is_on_one_page():
    listed = [
        name
        for page in API.glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(listed) == sorted(public_names())


def test_the_names_were_found():
    assert inspect.ismodule(importlib.import_module("tf_adadp.tuning"))
    assert {"tf_adadp.ADADP", "tf_adadp.accounting.epsilon"} <= set(public_names())
