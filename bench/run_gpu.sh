#!/usr/bin/env bash
# Sets up, tests and measures on a machine with GPUs: `bench/run_gpu.sh OUT_DIR [SUITE...]`.
#
# Suites: tests reach collectives room priority overhead residency persistent pairs oracle. Results land in OUT_DIR as
# JSON and Markdown, logs in OUT_DIR/log.txt. Copy results that are to be quoted into bench/results/.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
suites=${*:-tests room priority overhead residency persistent pairs oracle}
# NVLink multicast stays off: on shared hosts it can take GPUs out of service for others.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OVERLAPCTL_TEST_OUT=$out OVERLAPCTL_CACHE_DIR=${OVERLAPCTL_CACHE_DIR:-$out/cache}
log=$out/log.txt
failed=()
step() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name" | tee -a "$log"
  if ! "$@" >>"$log" 2>&1; then
    failed+=("$name")
    tail -25 "$log"
  fi
  echo "   $name: $((SECONDS - start)) s" | tee -a "$log"
}
step setup tools/setup_env.sh plot
python=${VENV:-.venv}/bin/python
for suite in $suites; do
  case $suite in
    tests) step tests "$python" -m pytest -q -p no:cacheprovider tests/gpu tests/multigpu ;;
    reach) step reach "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_reach.py ;;
    collectives) step collectives "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_collectives.py ;;
    room) step room "$python" bench/overlap/room.py "$out" ;;
    priority) step priority "$python" bench/overlap/priority.py "$out" ;;
    multi-gpu) step multi-gpu "$python" bench/overlap/multi_gpu.py "$out" ;;
    overhead) step overhead "$python" bench/overhead/torch_loop.py "$out" ;;
    residency) step residency "$python" bench/residency/sweep.py "$out" ;;
    persistent) step persistent "$python" bench/residency/persistent.py "$out" ;;
    pairs) step pairs "$python" bench/overlap/pairs.py "$out" ;;
    oracle) step oracle "$python" bench/overlap/oracle.py "$out" ;;
    *) echo "unknown suite $suite" && failed+=("$suite") ;;
  esac
done
grep -hE "passed|failed" "$log" | tail -5
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}"; exit 1; }
