"""Settings for all tests."""

import os

from hypothesis import settings

# CI draws the same examples each time: what it says of a change depends on the change alone.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
