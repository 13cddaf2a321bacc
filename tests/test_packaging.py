"""The wheel and the source distribution: what is in them, and that the wheel works installed."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest

import tf_adadp

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.extended


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    made = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return made.stdout + made.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, the source distribution and what the build said; from the tracked files alone."""
    folder = tmp_path_factory.mktemp("build")
    source, dist = folder / "source", folder / "dist"
    for name in run("git", "ls-files", cwd=ROOT).split():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    said = run(sys.executable, "-m", "build", "--no-isolation", "-o", dist, ".", cwd=source)
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return wheel, archive, said


def test_building_gives_no_deprecation_warning(built):
    assert "deprecat" not in built[2].lower()


def test_the_wheel_has_the_package_and_nothing_else(built):
    assert built[0].name.startswith(f"tf_adadp-{tf_adadp.__version__}-")
    names = zipfile.ZipFile(built[0]).namelist()
    assert {"tf_adadp/py.typed", "tf_adadp/__init__.pyi"} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"tf_adadp", f"tf_adadp-{tf_adadp.__version__}.dist-info"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "tf_adadp").rglob("*.py")}
    assert modules <= set(names)


def test_the_source_distribution_builds_on_its_own(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "LICENSE", "CHANGELOG.md", "README.md"} <= names
    assert not any(name.startswith(("tests/", "benchmarks/", "verification/")) for name in names)


def test_the_installed_wheel_imports(built, tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    found = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    )
    site = pathlib.Path(found.strip())
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    run(*pip, built[0], cwd=tmp_path)
    # The dependencies are those of the environment that runs the tests; an editable install of this
    # package there is not followed, since its .pth file is not.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import importlib.metadata, sys, tf_adadp as dp\n"
        "assert 'tensorflow' not in sys.modules\n"
        "assert importlib.metadata.version('tf_adadp') == dp.__version__\n"
        "missing = [name for name in dp.__all__ if not hasattr(dp, name)]\n"
        "assert missing == [], missing\n"
        "print(dp.__file__)"
    )
    printed = run(
        python, "-I", "-W", "error::DeprecationWarning:tf_adadp", "-c", code, cwd=tmp_path
    )
    assert str(site) in printed
