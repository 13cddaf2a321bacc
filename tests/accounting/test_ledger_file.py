"""One writer at a time, written ahead, and nothing overwritten."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tf_adadp.accounting import PoissonSampling, PrivacyLedger
from tf_adadp.accounting.files.ledger_file import LedgerFile

LAW = PoissonSampling(1000, 100)
EVENT = LAW.event(1.0)
DELTA = 1e-5
HOLD = """
import sys, time
from tf_adadp.accounting.files.ledger_file import LedgerFile
file = LedgerFile(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def filled(count=10, law=LAW):
    ledger = PrivacyLedger()
    ledger.add(law.event(1.0), count, law=law)
    return ledger


def test_written_ahead_and_settled(tmp_path):
    path, ledger = tmp_path / "ledger.json", filled()
    file = LedgerFile(path)
    assert file.stored.steps == 0
    ahead = ledger.announced()
    ahead.add(EVENT, 5, law=LAW)
    file.write(ahead)
    assert PrivacyLedger.load(path).steps == 15
    assert ledger.steps == 10
    ledger.add(EVENT, 5, law=LAW)
    file.write(ledger)
    assert PrivacyLedger.load(path).steps == 15
    file.close()
    assert os.listdir(tmp_path) == ["ledger.json"]
    with pytest.raises(RuntimeError, match=r"ledger\.json.*does not hold"):
        file.write(ledger)
    file = LedgerFile(path)
    assert file.stored.entries == ledger.entries
    file.close()


@pytest.mark.parametrize("fresh", [True, False])
def test_a_checkpoint_and_what_was_announced_are_not_counted_twice(fresh, tmp_path):
    """The process saved a checkpoint within an interval, and was killed before the next write."""
    ledger, path = PrivacyLedger() if fresh else filled(), tmp_path / "ledger.json"
    before = ledger.steps
    ahead = ledger.announced()
    ahead.add(EVENT, 50, law=LAW)
    ahead.save(path)
    ledger.add(EVENT, 20, law=LAW)
    resumed = PrivacyLedger.from_json(ledger.to_json())  # as loaded with the weights
    ledger.add(EVENT, 15, law=LAW)  # and here it was killed
    resumed.merge(PrivacyLedger.load(path))
    assert resumed.steps == before + 50
    resumed.add(EVENT, 7, law=LAW)  # a life of its own:
    ledger.merge(resumed)
    assert ledger.steps == before + 57


@pytest.mark.parametrize("through", ["path", "link", "folder"])
def test_a_second_writer_in_the_same_process_is_refused(tmp_path, through):
    path = tmp_path / "ledger.json"
    filled().save(path)
    other = {
        "path": path,
        "link": tmp_path / "link.json",
        "folder": tmp_path / "b" / ".." / "ledger.json",
    }[through]
    (tmp_path / "b").mkdir()
    (tmp_path / "link.json").symlink_to(path)
    before = path.read_bytes()
    file = LedgerFile(path)
    with pytest.raises(BlockingIOError, match=rf"in use.*process {os.getpid()}.*json"):
        LedgerFile(other)
    with pytest.raises(BlockingIOError, match="in use"):
        PrivacyLedger.load(path).save(other)
    assert path.read_bytes() == before
    file.close()
    LedgerFile(other).close()


def test_a_killed_process_leaves_no_lock(tmp_path):
    path = tmp_path / "ledger.json"
    filled().save(path)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match=rf"in use.*process {holder.pid} on "):
            LedgerFile(path)
        assert PrivacyLedger.load(path).steps == 10  # reading needs no lock
        holder.send_signal(signal.SIGKILL)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert (tmp_path / ".ledger.json.lock").exists()
    file = LedgerFile(path)
    file.write(file.stored)
    file.close()
    assert os.listdir(tmp_path) == ["ledger.json"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_neither_writes_nor_keeps_the_lock(tmp_path):
    path, ledger = tmp_path / "ledger.json", filled()
    file = LedgerFile(path)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            file.write(PrivacyLedger())
        except RuntimeError as error:
            os.write(writable, str(error).encode())
        file.close()  # gives away nothing that is not its own
        signal.pause()
    os.close(writable)
    with os.fdopen(readable, "rb", buffering=0) as answer:
        assert b"opened before os.fork" in answer.read(1000)
        try:
            with pytest.raises(BlockingIOError, match="in use"):
                LedgerFile(path)
            file.write(ledger)
            file.close()
            LedgerFile(path).close()  # although the child is alive
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_file_that_someone_else_changed_is_not_overwritten(tmp_path):
    path, ledger = tmp_path / "ledger.json", filled()
    file = LedgerFile(path)
    file.write(ledger)
    other = filled(500)
    path.write_text(other.to_json())
    with pytest.raises(ValueError, match=r"ledger\.json was changed by someone else"):
        file.write(ledger)
    assert PrivacyLedger.load(path).steps == 500
    path.unlink()
    file.write(ledger)  # one that was lost is written again
    assert PrivacyLedger.load(path).steps == 10
    file.close()


@pytest.mark.parametrize("content", ["", "{}", filled().to_json()[:-40]])
def test_a_damaged_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "ledger.json"
    path.write_text(content)
    for write in (lambda: LedgerFile(path), lambda: filled().save(path)):
        with pytest.raises(
            ValueError, match=r"ledger\.json: not a usable privacy ledger: its|it is"
        ):
            write()
    assert path.read_text() == content
    assert os.listdir(tmp_path) == ["ledger.json"]
    filled(3).save(path, replace=True)
    assert PrivacyLedger.load(path).steps == 3


def test_saving_never_lowers_what_a_file_records(tmp_path):
    path = tmp_path / "ledger.json"
    ledger = filled(20)
    earlier = PrivacyLedger.from_json(ledger.to_json())
    earlier.save(path)
    ledger.add(EVENT, law=LAW)
    ledger.save(path)
    for other in (earlier, filled(1000), PrivacyLedger()):
        with pytest.raises(ValueError, match=r"ledger\.json records releases.*not overwritten"):
            other.save(path)
        assert PrivacyLedger.load(path).steps == 21
    other = filled(5)
    other.merge(PrivacyLedger.load(path))
    other.save(path)
    assert PrivacyLedger.load(path).epsilon(DELTA) == filled(26).epsilon(DELTA)
    lost = PrivacyLedger.load(path)
    lost.mark_unknown("history was lost")
    lost.save(path)
    with pytest.raises(ValueError, match="not overwritten"):
        other.save(path)


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        LedgerFile(tmp_path / "nowhere" / "ledger.json")
    assert not pathlib.Path(tmp_path / "nowhere").exists()
