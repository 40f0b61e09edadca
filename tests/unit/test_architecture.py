"""The package's shape: imports go down only, public names are sorted, importing touches no GPU."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import overlapctl

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold():
    lint = pytest.importorskip("importlinter.cli", reason="import-linter is not installed")
    assert lint.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_importing_the_package_imports_no_gpu_library():
    code = (
        "import sys, overlapctl, overlapctl.cli, overlapctl.session\n"
        "print([m for m in ('torch', 'triton', 'cuda', 'pynvml') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_module_imports_without_a_gpu_and_sorts_its_public_names():
    for module in pkgutil.walk_packages(overlapctl.__path__, "overlapctl."):
        if module.name.endswith(("__main__", "liboverlapctl_shim")):  # the latter: no Python
            continue
        names = getattr(importlib.import_module(module.name), "__all__", [])
        # Constants, then classes, then functions: as ruff (RUF022) sorts them.
        order = sorted(names, key=lambda n: (not n.isupper(), not n[0].isupper(), n))
        assert list(names) == order, module.name


def test_public_names_resolve():
    for name in overlapctl.__all__:
        assert getattr(overlapctl, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = overlapctl.no_such_name
