"""The examples' text: sentences of the docstrings of installed packages, labelled by package."""

import ast
import collections
import importlib.util
import pathlib
import random
import re
import sysconfig
import warnings

import numpy as np

STANDARD_LIBRARY = "the standard library"
_WORDS = range(6, 31)  # of a sentence; shorter ones tell nothing
_NOT_PROSE = re.compile(r"[`*_{}<>|=\\\[\]]|::|--|\.\.|https?:")


def of_package(name, number, seed=0):
    """Returns up to `number` different sentences of a package's docstrings.

    The source files are parsed, and nothing of the package is imported. Sentences that name the
    package are left out, since they would give the label away.

    Args:
        name: an importable package, or `STANDARD_LIBRARY`.
        number: of sentences.
        seed: of the order in which files are read.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    files = sorted(_files(name))
    random.Random(seed).shuffle(files)
    found = {}  # in order, without duplicates
    for path in files:
        for sentence in _sentences(path):
            if name.split()[-1] not in sentence.lower():
                found.setdefault(sentence)
        if len(found) >= number:
            break
    return list(found)[:number]


def labelled(packages, number, seed=0, but=()):
    """Returns sentences of packages and the numbers of their packages: shuffled arrays.

    A sentence that is in several packages, or in `but`, is left out: it would be one record with
    several sources.

    Args:
        packages: as for `of_package`.
        number: of sentences of each, at most.
        seed: of the order of files and sentences.
        but: sentences to leave out.
    """
    found = [of_package(name, 2 * number, seed) for name in packages]
    count = collections.Counter(sentence for of_one in found for sentence in of_one)
    count.update(but)
    pairs = [
        (sentence, label)
        for label, of_one in enumerate(found)
        for sentence in [s for s in of_one if count[s] == 1][:number]
    ]
    random.Random(seed).shuffle(pairs)
    texts = np.array([sentence for sentence, _ in pairs], dtype=object)
    return texts, np.array([label for _, label in pairs], dtype=np.int32)


def word_pieces(texts, number=2500):
    """Returns the vocabulary of a BERT tokenizer: `number` frequent words, letters for all others.

    It tells which words are in the texts, so these must be public.
    """
    words = collections.Counter()
    for text in texts:
        words.update(re.findall(r"[a-z]{2,}", text.lower()))
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    frequent = [word for word, _ in words.most_common(number)]
    return [*special, *letters, *(f"##{letter}" for letter in letters), *frequent]


def _files(name):
    if name == STANDARD_LIBRARY:
        folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "test", "tests"}
    else:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"The package {name} is not installed.", name=name)
        folder, skipped = pathlib.Path(spec.origin).parent, {"test", "tests", "_vendor"}
    for path in folder.rglob("*.py"):
        if not skipped & set(path.relative_to(folder).parts):
            yield path


def _sentences(path):
    """Yields the sentences of a file's docstrings that are prose."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of the files' own making
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
            for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
                prose = sentence.endswith(".") and not _NOT_PROSE.search(sentence)
                if prose and sentence.isascii() and len(sentence.split()) in _WORDS:
                    yield sentence
