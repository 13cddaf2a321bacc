"""Code in the pages uses names and arguments that exist."""

import ast
import inspect
import pathlib
import re

import pytest

import tf_adadp
from tests.helpers import python_blocks
from tf_adadp import accounting, audit, clipping, priors, tuning

ROOT = pathlib.Path(__file__).parents[2]
# The changelog also has names that are gone.
PAGES = [*(p for p in ROOT.glob("*.md") if p.stem != "CHANGELOG"), *(ROOT / "docs").rglob("*.md")]
MODULES = {
    "dp": tf_adadp,
    "tf_adadp": tf_adadp,
    "accounting": accounting,
    "audit": audit,
    "clipping": clipping,
    "priors": priors,
    "tuning": tuning,
}


def calls(page):
    """Yields (module name, names below it, keyword arguments) of the code of a page.

    Code is what is fenced as Python, and what stands between backquotes and is an expression.
    """
    fenced = python_blocks(page)
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in [*fenced, *re.findall(r"`([^`\n]+)`", text)]:
        try:
            tree = ast.parse(code.replace("…", "..."))
        except SyntaxError:
            assert code not in fenced, code
            continue
        keywords = {}  # of calls, by the node that is called, which `walk` gives after the call
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                keywords[node.func] = {k.arg for k in node.keywords if k.arg}
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.fullmatch(r"\w+(\.\w+)+", name) and name.split(".")[0] in MODULES:
                module, *names = name.split(".")
                yield module, names, keywords.get(node, set())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_and_arguments_exist(page):
    missing = []
    for module, names, keywords in calls(page):
        found = MODULES[module]
        try:
            for name in names:
                found = getattr(found, name)
        except AttributeError as error:
            missing.append(f"{module}.{'.'.join(names)}: {error}")
            continue
        if keywords:
            missing += [f"{names[-1]}({k}=)" for k in keywords - arguments(found)]
    assert missing == []


def arguments(function):
    """Returns the names of the arguments of a function, or of a class and its base classes.

    A class method hands those that it does not name to its class.
    """
    owner = getattr(function, "__self__", None)
    found = arguments(owner) if inspect.isclass(owner) else set()
    for part in function.__mro__ if inspect.isclass(function) else [function]:
        found |= set(inspect.signature(part).parameters)
    return found


def test_a_wrong_name_and_a_wrong_argument_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\ndp.ADADP(noise=1.0)\n```\n`dp.Missing`\n", encoding="utf-8")
    assert list(calls(page)) == [("dp", ["ADADP"], {"noise"}), ("dp", ["Missing"], set())]
    assert not {"noise"} <= arguments(tf_adadp.ADADP)
    assert {"noise_multiplier", "learning_rate"} <= arguments(tf_adadp.ADADP)
