"""The fine-tuning of keras_hub's tasks, at small sizes."""

import json
import pathlib
import subprocess
import sys

import pytest
import sentences

import tf_adadp as dp

FOLDER = pathlib.Path(sentences.__file__).parent
SCRIPTS = ("finetune_image.py", "finetune_text.py")
needs_hub = "keras_hub comes with the extra tf_adadp[hub]"


def run(script, *arguments):
    """Runs a script as a user does: its flags have names of train.py's, which one process could
    not define twice."""
    return subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments], capture_output=True, text=True
    )


def summary_of(script, *arguments):
    pytest.importorskip("keras_hub", reason=needs_hub)
    done = run(script, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_sentences_are_prose_without_the_name_of_their_package():
    found = sentences.of_package("sklearn", 200)
    assert len(found) == len(set(found)) == 200
    assert found == sentences.of_package("sklearn", 200)
    assert all(s.endswith(".") and "sklearn" not in s.lower() for s in found)
    assert all(6 <= len(s.split()) <= 30 for s in found)
    with pytest.raises(ModuleNotFoundError, match="no_such_package is not installed"):
        sentences.of_package("no_such_package", 1)


def test_no_sentence_is_in_two_places():
    """One sentence is one record: of one package, and public or private."""
    public, _ = sentences.labelled(["numpy", "scipy"], 300)
    private, labels = sentences.labelled(["numpy", "sklearn"], 300, but=public)
    assert len(set(public)) == len(public) == 600
    assert len(set(private)) == len(private)
    assert not set(public) & set(private)
    assert set(labels) == {0, 1}


def test_word_pieces_are_frequent_words_and_letters():
    pieces = sentences.word_pieces(["Public words are public.", "A word is public."], number=1)
    assert pieces[-1] == "public"
    assert {"a", "##z", "[MASK]"} <= set(pieces)
    assert "words" not in pieces
    assert len(set(pieces)) == len(pieces)


@pytest.mark.extended
def test_text_is_fine_tuned():
    summary = summary_of(
        "finetune_text.py", "--sentences=150", "--public_epochs=1", "--epochs=1", "--lot_size=60"
    )
    assert summary["private_records"] == 600
    assert summary["epsilon"] == pytest.approx(3.0, rel=0.02)
    assert summary["epsilon"] <= 3.0
    assert summary["engine"] == "ghost"
    assert summary["trained_weights"] < summary["all_weights"] / 10
    assert summary["steps"] == 10
    expected = dp.accounting.epsilon(summary["noise_multiplier"], 0.1, 10, 1e-5)
    assert summary["epsilon"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.extended
def test_a_head_is_trained_on_a_frozen_backbone():
    summary = summary_of("finetune_image.py", "--public_epochs=5", "--target_epsilon=8")
    assert summary["accuracy"] > 2 * summary["majority_baseline"]
    assert summary["epsilon"] <= 8.0
    assert summary["engine"] == "ghost"
    assert summary["trained_weights"] == 5 * 129


@pytest.mark.extended
@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_out_of_range_are_refused(script):
    few = ("--sentences=150",) if script == "finetune_text.py" else ()
    done = run(script, "--lot_size=99999", *few)
    assert "--lot_size=99999: there are " in done.stderr
    assert "--target_epsilon" in run(script, "--target_epsilon=0").stderr
