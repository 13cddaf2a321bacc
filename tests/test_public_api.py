"""Tests that all public names have type hints and a docstring."""

import importlib
import inspect
import pkgutil

import pytest

import tf_adadp

ROOMS = sorted(
    module.name for module in pkgutil.iter_modules(tf_adadp.__path__, "tf_adadp.") if module.ispkg
)
_SPECIAL = ("__init__", "__call__")  # the only special methods that callers see arguments of


def public_objects(room):
    module = importlib.import_module(room)
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield f"{room}.{name}", value


def members(name, value):
    """A function itself; of a class its constructor, public methods and properties."""
    if not inspect.isclass(value):
        yield name, value
        return
    for attribute, member in vars(value).items():
        if attribute.startswith("_") and attribute not in _SPECIAL:
            continue
        if isinstance(member, property):
            yield f"{name}.{attribute}", member.fget
        elif isinstance(member, (classmethod, staticmethod)):
            yield f"{name}.{attribute}", member.__func__
        elif inspect.isfunction(member):
            yield f"{name}.{attribute}", member


def without_annotation(function):
    empty = inspect.Parameter.empty
    signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        if parameter.annotation is empty and name not in ("self", "cls"):
            yield name
    if signature.return_annotation is empty and function.__name__ != "__init__":
        yield "return"


@pytest.mark.parametrize("room", ["tf_adadp", *ROOMS])
def test_public_names_have_type_hints_and_docstrings(room):
    missing = []
    for name, value in public_objects(room):
        if not inspect.getdoc(value):
            missing.append(f"{name}: docstring")
        for where, function in members(name, value):
            if not function.__module__.startswith("tf_adadp"):
                continue
            if not where.endswith(_SPECIAL) and not inspect.getdoc(function):
                missing.append(f"{where}: docstring")
            missing += [f"{where}: {argument}" for argument in without_annotation(function)]
    assert missing == []


@pytest.mark.parametrize("room", ["optimizers", "sampling"])
def test_what_trains_has_a_short_name(room):
    """A name of these rooms is also `dp.<name>`, by a line of the stub."""
    names = set(importlib.import_module(f"tf_adadp.{room}").__all__)
    assert names - {*tf_adadp.__all__, "Lots", "SampledLots"} == set()
