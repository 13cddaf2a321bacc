"""Attaches values to variables and models; no other module does so.

All other state is held by an object that owns it. Three things have no such owner:

- The history of weights. Any model, layer or loop that uses a variable finds the releases about it
  from the variable alone. A separate table would keep variables alive, or lose a history when an
  `id` is used again.
- Compiled engines and steps of a plain model. They hold the model and its graphs, so they live
  exactly as long as the model does.
- The report of `make_compatible`, attached to the copy that it returns.

Values go into `__dict__`, past Keras's `__setattr__`, which would track them and save them.
"""

from typing import Any

OPTIMIZERS = "_tf_adadp_optimizers"  # of a variable: the private optimizers built for it
LEDGER = "_tf_adadp_ledger"  # of a variable or a plain model: the ledger about it
CHARGED_LEDGERS = "_tf_adadp_charged_ledgers"  # of a variable: others that custom loops charged
LEFT = "_tf_adadp_left"  # of a variable: a few entries, as the last private training left them
ENGINES = "_tf_adadp_engines"  # of a plain model: the engines that `clipped_sum` made for it
STEPS = "_tf_adadp_steps"  # of a plain model: the steps that `private_step` made for it
CHANGES = "_tf_adadp_changes"  # of a plain model: the report of `make_compatible`, which made it
COPY = "__deepcopy__"  # of a plain model: the function that `copy.deepcopy` calls


def attach(owner: Any, name: str, value: Any) -> None:
    """Attaches a value to a variable or model, in place of an earlier one."""
    vars(owner)[name] = value


def attached(owner: Any, name: str, default: Any = None) -> Any:
    """Returns the object attached under a name, or the default."""
    return vars(owner).get(name, default)


def attached_dict(owner: Any, name: str) -> dict:
    """Returns the dict that is attached under a name, an empty one at first."""
    return vars(owner).setdefault(name, {})


def detach(owner: Any, name: str) -> None:
    """Removes the object attached under a name, if there is one."""
    vars(owner).pop(name, None)
