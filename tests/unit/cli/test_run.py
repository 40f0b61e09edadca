import os
import subprocess
import sys
from pathlib import Path

import pytest

from overlapctl import env
from overlapctl.cli import run as command
from overlapctl.cli.app import main
from overlapctl.errors import UsageError
from overlapctl.records import Policy

SHIM = Path("/opt/env/liboverlapctl_shim.so")


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Catch what would be executed."""
    library = tmp_path / "liboverlapctl_shim.so"
    library.write_bytes(b"")
    library.chmod(0o644)
    calls = []
    monkeypatch.setattr(command, "library_path", lambda: library)
    monkeypatch.setattr(command.os, "execvpe", lambda *arguments: calls.append(arguments))
    monkeypatch.delenv("LD_PRELOAD", raising=False)

    def start(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["run", *arguments])
        return caught.value.code, calls[-1] if calls else None

    start.library = library
    return start


def test_the_program_gets_its_arguments_and_the_shim(started):
    code, (program, arguments, environ) = started("--", "train.py", "--max-blocks", "9", "-x")
    assert code == 0
    assert (program, arguments) == ("train.py", ["train.py", "--max-blocks", "9", "-x"])
    assert environ["LD_PRELOAD"] == environ[env.SHIM] == str(started.library)
    assert environ[env.POLICY] == "priority=1"


def test_options_become_the_policy(started):
    options = ("--max-blocks", "3", "--pad", "48KiB", "--carveout", "100", "--no-comm-priority")
    _, (_, arguments, environ) = started(*options, "python", "-c", "pass")
    assert environ[env.POLICY] == "pad=49152;blocks=3;carveout=100"
    assert arguments == ["python", "-c", "pass"]


def test_the_preload_goes_first_once_and_keeps_what_is_there():
    environ = command.child_environment(
        {"LD_PRELOAD": f"/a.so:{SHIM} /b.so", "HOME": "/h"}, SHIM, Policy()
    )
    assert environ["LD_PRELOAD"] == f"{SHIM} /a.so /b.so"
    assert environ["HOME"] == "/h"


@pytest.mark.parametrize("folder", ["/with space", "/with:colon"])
def test_a_path_that_cannot_be_preloaded_is_told(folder):
    with pytest.raises(UsageError, match="separator"):
        command.child_environment({}, Path(folder) / "shim.so", Policy())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 2),
        (("--max-blocks", "0", "--", "true"), 2),
        (("--carveout", "101", "--", "true"), 2),
        (("--pad", "2MiB", "--", "true"), 2),
        (("--pad", "many", "--", "true"), 2),
        (("--profile", "/nowhere/p.json", "--", "true"), 5),
        (("--unknown", "--", "true"), 2),
    ],
)
def test_wrong_use_has_an_exit_code_and_starts_nothing(started, arguments, code, capsys):
    assert started(*arguments) == (code, None)
    assert capsys.readouterr().err


def test_a_profile_others_can_write_is_refused(started, tmp_path):
    profile = tmp_path / "p.json"
    profile.write_text("{}")
    profile.chmod(0o666)
    assert started("--profile", str(profile), "--", "true") == (5, None)


def test_a_shim_others_can_write_is_refused(started):
    started.library.chmod(0o666)
    assert started("--", "true") == (4, None)


@pytest.mark.parametrize(("program", "code"), [("no-such-program-here", 127), ("/etc/passwd", 126)])
def test_a_program_that_cannot_be_run(program, code, tmp_path):
    script = (
        "import sys\nfrom pathlib import Path\nfrom overlapctl.cli import run, main\n"
        "run.library_path = lambda: Path(sys.argv[1])\nmain(['run', '--', sys.argv[2]])\n"
    )
    library = tmp_path / "shim.so"
    library.write_bytes(b"")
    library.chmod(0o644)
    done = subprocess.run(
        [sys.executable, "-c", script, str(library), program],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        check=False,
    )
    assert done.returncode == code
    assert program in done.stderr
