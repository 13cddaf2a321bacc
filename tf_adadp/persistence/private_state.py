"""The private state file: a run's secret keys, for one bit-identical continuation of it.

Keys MOVE. Saving gives the keys to the file, and the model goes on under new ones; loading takes
them out of the file, which is deleted before they are in use. So at any time one run, or one file,
has a key, and no noise is ever drawn under the same key and step for two releases: not where a run
goes on after saving, and not where it is killed in between. What this cannot see are copies of the
file; see `DPModel.load_private_state`.

The file is JSON with a checksum, which tells damage and careless edits, and is no signature. It is
bound to the optimizer's class and steps, and to the ledger: to every entry and its count.
"""

import dataclasses
import errno
import json
import os
import pathlib
import stat
import uuid

from tf_adadp import noise
from tf_adadp.accounting.files.atomic import sync_folder
from tf_adadp.accounting.files.document import checksum_of
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.distribution.workers import num_workers
from tf_adadp.sampling.keys import LotKey, StepCounter

_FORMAT, _VERSION = "tf_adadp.PrivateState", 1
_FIELDS = {"id", "optimizer", "iterations", "ledger", "keys", "lots"}


@dataclasses.dataclass
class LotsInUse:
    """The lots of a `fit`, without their data: key, law, and the steps that it took for itself."""

    key: LotKey
    law: SamplingLaw
    counter: StepCounter
    first: int
    end: int

    @classmethod
    def of(cls, lots, num_lots=0):
        """That of lots before one iteration of num_lots; None where they have no secret key."""
        if lots.secret_key is None:
            return None
        passes = -(-num_lots // lots.law.lots_per_pass)
        end = lots.step + passes * lots.law.lots_per_pass
        return cls(lots.secret_key, lots.law, lots.counter, lots.step, end)


def save(model, lots, path):
    """See `DPModel.save_private_state`. `lots` is a `LotsInUse` or None."""
    optimizer = model.optimizer
    if not optimizer.built:
        raise ValueError("save_private_state before training: there is no state yet. Train first.")
    if num_workers(model.distribute_strategy) > 1:
        raise ValueError(
            "save_private_state on several hosts: every `fit` gives them new keys, and their "
            "lots have keys of their own. Resume from the weights and the ledger."
        )
    if optimizer.seed is not None:
        raise ValueError(
            f"seed={optimizer.seed}: a seeded run has no secrets, and continues bit by bit from "
            "its saved weights alone. Leave save_private_state out."
        )
    if optimizer.uncharged_releases:
        raise ValueError(
            f"{optimizer.uncharged_releases} releases were not charged; a run that goes on from "
            "here could not report its ε. Call `optimizer.charge` before every release."
        )
    keys = _keys(optimizer)
    for key in keys.values():
        key.check_process()
    position = model._run.position
    if lots is not None and position % lots.law.lots_per_pass:
        raise ValueError(
            f"the last `fit` ended {position % lots.law.lots_per_pass} lots into a pass of "
            f"{lots.law.lots_per_pass}, and passes are drawn, and paid for, whole. Train to the "
            "end of a pass first."
        )
    if lots is not None and lots.counter.next != lots.end:
        raise ValueError(
            "the lots of the last `fit` were drawn from elsewhere since, and a continuation would "
            "draw some of those again. Train on lots that nothing else uses."
        )
    file = _create(path)
    with file:
        # From here on the keys are in the file, or nowhere.
        state = {
            "id": uuid.uuid4().hex,
            "optimizer": type(optimizer).__name__,
            "iterations": optimizer.steps_taken,
            "ledger": _fingerprint(model.ledger),
            "keys": {name: key.hand_over() for name, key in keys.items()},
            "lots": None,
        }
        if lots is not None:
            state["lots"] = {
                "law": lots.law.to_config(),
                "key": f"{lots.key.hand_over():x}",
                "step": lots.first + position,
            }
            model._run.lots = None  # of the old key
        document = {"format": _FORMAT, "version": _VERSION, "sha256": checksum_of(state)}
        file.write(json.dumps({**document, "state": state}).encode())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(pathlib.Path(path))


def load(model, path):
    """See `DPModel.load_private_state`. Returns what `resume_lots` needs, or None."""
    _check_system()
    optimizer = model.optimizer
    if optimizer.seed is not None:
        raise ValueError(f"seed={optimizer.seed}: this run has no secrets to load.")
    if optimizer.uncharged_releases:
        raise ValueError(
            f"{optimizer.uncharged_releases} releases of this optimizer were not charged, and "
            "would be forgotten. Load into a new model."
        )
    path = pathlib.Path(path)
    claimed = path.with_name(f".{path.name}.{uuid.uuid4().hex}.claimed")
    try:
        os.rename(path, claimed)  # of two that load the file, one has it
    except FileNotFoundError:
        raise FileNotFoundError(
            errno.ENOENT,
            "there is no such private state. It may have been loaded: that can be done once. The "
            "run goes on without it, under new keys",
            os.fspath(path),
        ) from None
    try:
        state = _parse(_read(claimed))
        _check_fits(model, state)
    except BaseException as error:
        if not os.path.lexists(path):
            os.rename(claimed, path)
        if isinstance(error, ValueError):
            raise ValueError(f"{os.fspath(path)}: {error}") from error
        raise
    os.unlink(claimed)
    sync_folder(path)
    for name, key in _keys(optimizer).items():
        key.take_over(*state["keys"][name])
    optimizer.charges.settle()
    return state["lots"]


def resume_lots(lots, saved):
    """Lets new lots continue those of the saved run.

    Raises:
        ValueError: lots with another law, or that were drawn from already, or without a secret key.
    """
    law = SamplingLaw.from_config(saved["law"])
    fits = LotsInUse.of(lots)
    if fits is None or fits.first != 0 or fits.law != law:
        raise ValueError(
            f"the private state continues lots of {law.describe()}; got {lots!r}. Give the data "
            "and sampling arguments of the run that was saved, and lots that are new; or load the "
            "weights again, and leave the private state out."
        )
    fits.key.take_over(int(saved["key"], 16))
    lots.step = saved["step"]


def _keys(optimizer):
    return {name: k for name, k in vars(optimizer).items() if isinstance(k, noise.SecretKey)}


def _fingerprint(ledger):
    """Of every entry and its count, whatever their order."""
    entries = sorted((entry.id, entry.count) for entry in ledger.entries)
    return {"releases": ledger.steps, "sha256": checksum_of(entries)}


def _check_system():
    if os.name != "posix":
        raise OSError(
            errno.ENOSYS,
            "this system has no file modes, so others could read the keys. Resume without a "
            "private state, under new keys",
        )


def _create(path):
    _check_system()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise FileExistsError(
            errno.EEXIST,
            "a private state is written to a new file, that nobody has open and no link leads "
            "to. Delete this one, or give another path",
            os.fspath(path),
        ) from None
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "wb")


def _read(path):
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError("it is a symbolic link. Give the file itself.") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise ValueError("it is no plain file with one name. Give the file that was saved.")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError(
                f"others can read or replace it (mode {stat.S_IMODE(status.st_mode):o}, owner "
                f"{status.st_uid}): its keys may be known. Resume without it, under new keys."
            )
        return file.read()


def _parse(text):
    try:
        document = json.loads(text)
        format, version, state = (document[k] for k in ("format", "version", "state"))
        whole = document["sha256"] == checksum_of(state)
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            "it is no private state, or its writing was cut short. Resume without it."
        ) from None
    if format != _FORMAT:
        raise ValueError("it is no private state.")
    if version != _VERSION:
        raise ValueError(
            f"its version is {version!r}, this tf_adadp reads {_VERSION}. Resume without it."
        )
    if not whole or set(state) != _FIELDS:
        raise ValueError("it was edited or damaged. Resume without it, under new keys.")
    return state


def _check_fits(model, state):
    optimizer = model.optimizer
    mine = {
        "optimizer": type(optimizer).__name__,
        "iterations": optimizer.steps_taken,
        "ledger": _fingerprint(model.ledger),
    }
    for name, value in mine.items():
        if state[name] != value:
            raise ValueError(
                f"it is about another state of training: its {name} is {state[name]!r}, that of "
                f"this model {value!r}. Load the weights that were saved with it first."
            )
    if set(state["keys"]) != set(_keys(optimizer)):
        raise ValueError(
            f"it holds the keys {sorted(state['keys'])}, this optimizer has "
            f"{sorted(_keys(optimizer))}. It is of another version. Resume without it."
        )
