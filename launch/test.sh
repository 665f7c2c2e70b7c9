#!/usr/bin/env bash
# Installs what is missing and runs the whole default test suite (CPU, no network). Arguments go to pytest.
#
#   bash launch/test.sh [pytest arguments]
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/launch/install.sh"
venv=${NEXTTRANSFORMER_VENV:-$root/.venv}
case "$venv" in
  /*) ;;
  *) venv=$PWD/$venv ;;
esac

# A job's variables and a user's site must not reach the tests.
unset NNODES GPUS_PER_NODE NPROC_PER_NODE NODE_RANK MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE
unset NEXTTRANSFORMER_SITE_CONFIG NEXTTRANSFORMER_DEMO_DIR PYTHONPATH ${!SLURM_@}
# The default suite is the same with and without a GPU; the tests marked gpu see it.
case " $* " in
  *gpu*) ;;
  *) export CUDA_VISIBLE_DEVICES= ;;
esac
export OMP_NUM_THREADS=1 PATH="$venv/bin:$PATH" NEXTTRANSFORMER_VENV="$venv"
# One process for each core; a file's tests stay together, as they share what is expensive to make.
workers=$(python -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')
cd "$root"
exec python -m pytest -n "$workers" --dist loadfile --durations 15 --durations-min 1 "$@"
