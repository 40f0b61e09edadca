import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_HELPERS = Path(__file__).resolve().parents[2] / "helpers"


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    """Functions that make verdicts and profiles."""
    spec = importlib.util.spec_from_file_location(
        "profile_samples", _HELPERS / "profile_samples.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
