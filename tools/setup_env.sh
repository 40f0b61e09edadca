#!/usr/bin/env bash
# Makes .venv ready to run and test overlapctl: `tools/setup_env.sh [EXTRAS]`.
#
# - A python3 that has torch >= 2.9 already keeps it: the environment sees the system's packages and
#   pip is told never to touch that torch.
# - Without torch and without a GPU, the pinned release of requirements/cpu.txt is installed first.
# - Without torch but with a GPU, pip's own choice for this platform is installed.
# pip's usual variables (PIP_NO_INDEX, PIP_FIND_LINKS, ...) work for machines without a network.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${1:-dev,plot}
venv=${VENV:-.venv}
python=${PYTHON:-python3}

# Sections in use below: this file, what is installed, the native sources the build reads.
stamp_of() {
  {
    echo "$extras"
    cat tools/setup_env.sh pyproject.toml requirements/cpu.txt CMakeLists.txt
    find overlapctl/launch/_shim -type f | LC_ALL=C sort | xargs cat
  } | sha256sum | cut -d' ' -f1
}
stamp="$venv/.overlapctl-$(stamp_of)"
if [ -e "$stamp" ] && "$venv/bin/python" -c 'import overlapctl, torch' 2>/dev/null; then exit 0; fi

has_torch() {
  "$1" -c 'import torch, sys; v = torch.__version__.split("+")[0].split(".")
sys.exit(0 if (int(v[0]), int(v[1])) >= (2, 9) else 1)' 2>/dev/null
}
has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "overlapctl needs Python 3.10 or newer as '$python': set PYTHON=/path/to/python3" >&2
  exit 1
fi
if [ ! -x "$venv/bin/python" ]; then
  site=()
  has_torch "$python" && site=(--system-site-packages)
  if ! "$python" -m venv "${site[@]}" "$venv"; then
    echo "python3 cannot make virtual environments: install its venv module (Debian: python3-venv)" >&2
    exit 1
  fi
  if [ ${#site[@]} -gt 0 ] && ! has_torch "$venv/bin/python"; then
    # $python lives in a virtual environment itself: see its packages, too.
    "$python" - "$venv" <<'PY'
import pathlib, site, sys
libs = list(pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages"))
libs[0].joinpath("parent-environment.pth").write_text("\n".join(site.getsitepackages()) + "\n")
PY
  fi
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)

constraints="$venv/constraints.txt"
: >"$constraints"
if has_torch "$venv/bin/python"; then
  "$venv/bin/python" -c 'import importlib.metadata as m
for name in ("torch", "triton"):
    try: print(f"{name}=={m.version(name)}")
    except m.PackageNotFoundError: pass' >"$constraints"
elif ! has_gpu; then
  cp requirements/cpu.txt "$constraints"
  "${pip[@]}" install -c "$constraints" torch
fi
"$venv/bin/python" -c 'import scikit_build_core' 2>/dev/null ||
  "${pip[@]}" install -c "$constraints" 'scikit-build-core>=0.10'
command -v cmake >/dev/null 2>&1 || [ -x "$venv/bin/cmake" ] ||
  "${pip[@]}" install -c "$constraints" cmake ninja
PATH="$PWD/$venv/bin:$PATH" "${pip[@]}" install --no-build-isolation -c "$constraints" -e ".[$extras]"
rm -f "$venv"/.overlapctl-*
touch "$stamp"
