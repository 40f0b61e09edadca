"""Makes the shared fake backend importable, here and in worker processes started from here."""

import sys
from pathlib import Path

_HELPERS = str(Path(__file__).resolve().parents[2] / "helpers")
if _HELPERS not in sys.path:
    sys.path.insert(0, _HELPERS)
