"""The private state file: a run's secret keys, for one bit-identical continuation of it.

Keys MOVE. Saving gives the keys to the file, and the model goes on under new ones; loading takes
them out of the file, which is deleted before they are in use. So at any time one run, or one file,
has a key, and no noise is ever drawn under the same key and step for two releases: not where a run
goes on after saving, and not where it is killed in between. What this cannot see are copies of the
file; see `DPModel.load_private_state`.

The file is JSON with a checksum, which detects damage and careless edits, not forgery. It is
bound to the optimizer's class and steps, and to the ledger: to every entry and its count.
"""

import dataclasses
import errno
import json
import os
import pathlib
import stat
import uuid
from typing import Any, Protocol

from tf_adadp.accounting import PrivacyLedger
from tf_adadp.accounting.files.atomic import sync_folder
from tf_adadp.accounting.files.document import checksum_of
from tf_adadp.accounting.laws import SamplingLaw
from tf_adadp.noise import SecretKey
from tf_adadp.sampling import Lots
from tf_adadp.sampling.keys import LotKey, StepCounter

_FORMAT, _VERSION = "tf_adadp.PrivateState", 1
_FIELDS = {"id", "optimizer", "iterations", "ledger", "keys", "lots"}


class Charged(Protocol):
    """Holds the restored part of an optimizer's charges."""

    def settle(self) -> None:
        """Counts every release as charged."""


class Keyed(Protocol):
    """Declares the part of a private optimizer that concerns keys and their releases."""

    built: bool
    seed: int | None
    steps_taken: int
    uncharged_releases: int
    secret_keys: dict[str, SecretKey]
    charges: Charged


@dataclasses.dataclass
class LotsInUse:
    """The lots of a `fit`, without their data.

    Attributes:
        key: their key; None once a file has it.
        law: their sampling law.
        counter: counts the steps that were handed out, to whomever.
        first, end: the steps that the `fit` took for itself, end excluded.
    """

    key: LotKey | None
    law: SamplingLaw
    counter: StepCounter
    first: int
    end: int

    @classmethod
    def of(cls, lots: Lots, num_lots: int = 0) -> "LotsInUse | None":
        """Returns those of lots before one iteration of num_lots; None without a secret key."""
        if lots.secret_key is None:
            return None
        passes = -(-num_lots // lots.law.lots_per_pass)
        end = lots.step + passes * lots.law.lots_per_pass
        return cls(lots.secret_key, lots.law, lots.counter, lots.step, end)

    def check_can_continue(self, position: int) -> None:
        """Refuses lots that cannot go on after `position` of them.

        Raises:
            ValueError: a pass is not at its end, or something else drew from the lots.
        """
        in_pass = position % self.law.lots_per_pass
        if in_pass:
            raise ValueError(
                f"the last `fit` ended {in_pass} lots into a pass of {self.law.lots_per_pass}, and "
                "passes are drawn and charged as a whole. Train to the end of a pass first."
            )
        if self.counter.next != self.end:
            raise ValueError(
                "the lots of the last `fit` were drawn from elsewhere since, and a continuation "
                "would draw some of those again. Train on lots that nothing else uses."
            )

    def hand_over(self, position: int) -> dict[str, Any]:
        """Returns law, key and step for the file; these lots have no key from then on."""
        key, self.key = self.key, None
        step = self.first + position
        return {"law": self.law.to_config(), "key": f"{key.hand_over():x}", "step": step}


def save(
    path: str | os.PathLike,
    optimizer: Keyed,
    ledger: PrivacyLedger,
    lots: LotsInUse | None,
    position: int,
) -> None:
    """Moves the keys of an optimizer, and of its lots, into a file.

    Args:
        path: a file that does not exist.
        optimizer: the private optimizer.
        ledger: the charges for it.
        lots: those that it was trained on; None where they have no secret key.
        position: how many of them were used.

    Raises: see `DPModel.save_private_state`.
    """
    if lots is not None and lots.key is None:
        lots = None  # another file has their key
    _check_has_secrets(optimizer)
    for key in optimizer.secret_keys.values():
        key.check_process()
    if lots is not None:
        lots.check_can_continue(position)
    file = _create(path)
    with file:
        # From here on the keys are in the file, or nowhere.
        state = {
            "id": uuid.uuid4().hex,
            "optimizer": type(optimizer).__name__,
            "iterations": optimizer.steps_taken,
            "ledger": _fingerprint(ledger),
            "keys": {name: key.hand_over() for name, key in optimizer.secret_keys.items()},
            "lots": None if lots is None else lots.hand_over(position),
        }
        document = {"format": _FORMAT, "version": _VERSION, "sha256": checksum_of(state)}
        file.write(json.dumps({**document, "state": state}).encode())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(pathlib.Path(path))


def load(path: str | os.PathLike, optimizer: Keyed, ledger: PrivacyLedger) -> dict[str, Any] | None:
    """Takes the keys out of a file, and deletes it.

    Returns:
        the argument of `resume_lots`; None if the lots had no secret key.

    Raises: see `DPModel.load_private_state`.
    """
    _check_system()
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
        _check_fits(optimizer, ledger, state)
    except BaseException as error:
        if not os.path.lexists(path):
            os.rename(claimed, path)
        if isinstance(error, ValueError):
            raise ValueError(f"{os.fspath(path)}: {error}") from error
        raise
    os.unlink(claimed)
    sync_folder(path)
    for name, key in optimizer.secret_keys.items():
        key.take_over(*state["keys"][name])
    optimizer.charges.settle()
    return state["lots"]


def resume_lots(lots: Lots, saved: dict[str, Any]) -> None:
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


def _check_has_secrets(optimizer):
    """Refuses an optimizer without keys to save, or whose run could not report its ε."""
    if not optimizer.built:
        raise ValueError("save_private_state before training: there is no state yet. Train first.")
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


def _fingerprint(ledger):
    """Returns number and checksum of all releases, for any order of the entries."""
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
            "a private state is written to a new file only, which no other process has open and "
            "no link leads to. Delete this one, or give another path",
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
            raise ValueError("it is not a plain file with one name. Give the saved file.")
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
            "it is not a private state, or its writing was interrupted. Resume without it."
        ) from None
    if format != _FORMAT:
        raise ValueError("it is not a private state.")
    if version != _VERSION:
        raise ValueError(
            f"its version is {version!r}, this tf_adadp reads {_VERSION}. Resume without it."
        )
    if not whole or set(state) != _FIELDS:
        raise ValueError("it was edited or damaged. Resume without it, under new keys.")
    return state


def _check_fits(optimizer, ledger, state):
    """Refuses a file about another optimizer, number of steps or ledger."""
    mine = {
        "optimizer": type(optimizer).__name__,
        "iterations": optimizer.steps_taken,
        "ledger": _fingerprint(ledger),
    }
    for name, value in mine.items():
        if state[name] != value:
            raise ValueError(
                f"it is about another state of training: its {name} is {state[name]!r}, that of "
                f"this model {value!r}. Load the weights that were saved with it first."
            )
    if set(state["keys"]) != set(optimizer.secret_keys):
        raise ValueError(
            f"it holds the keys {sorted(state['keys'])}, this optimizer has "
            f"{sorted(optimizer.secret_keys)}. It is of another version. Resume without it."
        )
