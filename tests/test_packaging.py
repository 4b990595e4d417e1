"""What lands in site-packages: `moe_xla` with `passes` and `ffi` inside it, nothing generic, installed or editable."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
INSTALLED_AS = {"moe_xla": "moe_xla", "passes": "moe_xla/passes", "ffi": "moe_xla/ffi"}
BUILD_EDITABLE = "import sys; from scikit_build_core import build; print(build.build_editable(sys.argv[1]))"
SHOW_FILES = """
import moe_xla, moe_xla.passes, moe_xla.passes.pipeline, moe_xla.ffi
for module in (moe_xla, moe_xla.passes, moe_xla.passes.pipeline, moe_xla.ffi):
    print(module.__file__)
"""


def run(*command, **keywords):
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, **keywords)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def unpacked(wheel, directory):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def imported_files(start):
    """Where the package comes from in a Python that runs `start` first, knows jax, and no installed moe_xla."""
    environment = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    # -S leaves out the .pth files, and with them an editable installation that these tests run in.
    command = [sys.executable, "-S", "-P", "-c", start + SHOW_FILES]
    return [pathlib.Path(line) for line in run(*command, env=environment).splitlines()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A directory as site-packages is after `pip install .`."""
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, ".")
    (wheel,) = directory.glob("*.whl")
    return unpacked(wheel, directory / "site-packages")


@pytest.fixture(scope="module")
def installed_editable(tmp_path_factory):
    """A directory as site-packages is after `pip install --editable .`."""
    directory = tmp_path_factory.mktemp("editable")
    wheel = run(sys.executable, "-c", BUILD_EDITABLE, directory).splitlines()[-1]
    return unpacked(directory / wheel, directory / "site-packages")


def metadata_directory():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return f"{project['name']}-{project['version']}.dist-info"


def test_nothing_but_the_package_lands_in_site_packages(installed):
    assert {path.name for path in installed.iterdir()} == {"moe_xla", metadata_directory()}


def test_wheel_holds_the_files_of_the_repository(installed):
    sources = {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in INSTALLED_AS.items()
        for path in (ROOT / source).rglob("*.py")
    }
    files = {path.relative_to(installed).as_posix() for path in installed.glob("moe_xla/**/*") if path.is_file()}
    assert files == sources | {"moe_xla/py.typed"}


def test_wheel_carries_the_license(installed):
    license_text = (installed / metadata_directory() / "licenses" / "LICENSE").read_text()
    assert "Apache License" in license_text


def test_installed_package_imports(installed):
    files = imported_files(f"import sys; sys.path.insert(0, {str(installed)!r})")
    assert [file.relative_to(installed).as_posix() for file in files] == [
        "moe_xla/__init__.py",
        "moe_xla/passes/__init__.py",
        "moe_xla/passes/pipeline.py",
        "moe_xla/ffi/__init__.py",
    ]


def test_editable_package_imports_from_the_repository(installed_editable):
    files = imported_files(f"import site; site.addsitedir({str(installed_editable)!r})")
    assert [file.relative_to(ROOT).as_posix() for file in files] == [
        "moe_xla/__init__.py",
        "passes/__init__.py",
        "passes/pipeline.py",
        "ffi/__init__.py",
    ]
