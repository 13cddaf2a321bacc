"""Rules of the house: rooms and their order, sizes, tags, documentation.

Private names of Keras and TensorFlow: `utils/test_keras_compat.py`.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "tf_adadp"
# From low to high; docs/explanation/design/rooms.md says what each holds.
ROOMS = (
    "utils",
    "accounting",
    "distribution",
    "clipping",
    "noise",
    "gradients",
    "sampling",
    "persistence",
    "charging",
    "optimizers",
    "metrics",
    "validation",
    "pca",
    "training",
    "model",
    "loading",
    "callbacks",
    "audit",
    "tuning",
)
TAGS = "tf_adadp.utils.attached"
WITHOUT_TENSORFLOW = re.compile(
    r"tf_adadp\.(accounting|utils)(?!\.(keras_compat|flat_groups)$)(\.|$)"
)


def _name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def _imports(name):
    """Yields the modules that a module imports, also inside functions and for type hints alone."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute."
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full != "tf_adadp.__version__":  # set before anything is imported
                    yield full if full in FILES else node.module


IMPORTS = {name: set(_imports(name)) for name in FILES}


def _rank(name):
    """Returns the place of a module's room; the package's own `__init__` is above all."""
    parts = name.split(".")
    return ROOMS.index(parts[1]) if len(parts) > 1 else len(ROOMS)


def test_every_module_is_in_a_room():
    rooms = {name.split(".")[1] for name in FILES if name != "tf_adadp"}
    assert rooms <= set(ROOMS)


def test_imports_go_down_the_rooms():
    upwards = [
        f"{name} imports {imported}"
        for name in FILES
        for imported in IMPORTS[name]
        if imported in FILES and _rank(imported) > _rank(name)
    ]
    assert not upwards


def test_no_module_imports_itself_through_others():
    edges = {name: imported & set(FILES) for name, imported in IMPORTS.items()}
    done, circles = set(), []

    def visit(name, path):
        if name in path:
            circles.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for imported in sorted(edges[name]):
                visit(imported, [*path, name])
            done.add(name)

    for name in FILES:
        visit(name, [])
    assert not circles


def test_accounting_imports_no_tensorflow():
    found = [
        f"{name} imports {imported}"
        for name in FILES
        if WITHOUT_TENSORFLOW.match(name)
        for imported in IMPORTS[name]
        if imported.split(".")[0] in ("keras", "tensorflow")
        or imported.startswith("tf_adadp")
        and not WITHOUT_TENSORFLOW.match(imported)
    ]
    assert not found


def test_files_are_short():
    lengths = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()
    }
    assert {name: length for name, length in lengths.items() if length > 450} == {}


def test_every_module_has_a_docstring():
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []


def test_tags_on_weights_and_models_are_set_in_one_file():
    """A tag is an attribute `_tf_adadp…` of an object of Keras's; one file has all their names."""
    found = {
        name
        for name in FILES
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("_tf_adadp")
    }
    assert found <= {TAGS}


# What a sentence without subject and verb begins with.
OPENINGS = {
    *("All", "As", "At", "By", "Everything", "For", "From", "How", "In", "Of", "On", "That"),
    *("To", "What", "When", "Where", "Whether", "Which", "Who", "With"),
}


def test_docstrings_begin_with_a_verb():
    names = ("benchmarks", "examples", "tests", "verification")
    folders = (PACKAGE, *(ROOT / name for name in names))
    found = []
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "Returns").split()[0].strip(",.:")
                if first in OPENINGS:
                    found.append(f"{path.name}:{getattr(node, 'lineno', 1)}: {first}")
    assert found == []


def test_the_build_notes_are_short():
    notes = (ROOT / "BUILD_NOTES.md").read_text(encoding="utf-8")
    assert len(notes.splitlines()) < 250


def test_links_and_paths_in_pages_lead_somewhere():
    folders = "benchmarks|verification|examples|tests|docs|tf_adadp"
    missing = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
        places = [page.parent / link for link in links if "://" not in link]
        paths = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*\w)", text)
        places += [ROOT / path for path in paths]
        missing += [f"{page.name}: {place}" for place in places if not place.exists()]
    assert not missing
