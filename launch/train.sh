#!/usr/bin/env bash
# Trains on this machine: torchrun around python -m nexttransformer.train, all arguments passed through.
#
#   launch/train.sh --config configs/baseline/dense_full.json --site-config site.local.json \
#     --output runs/dense_full --micro-batch 8 [--smoke-steps N | --formal] [--resume auto|never|PATH]
#
# Processes: NPROC_PER_NODE, else one for each visible GPU, else one on the CPU. Works without sourcing
# launch/env.sh first. The exit code is the trainer's: 0 finished or stopped and saved, 1 failed, 2 refused.
# launch/train.sh --help lists all options.
set -euo pipefail

folder=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
site=()
help=
previous=
for argument in "$@"; do
  [ "$previous" != --site-config ] || site=(--site-config "$argument")
  case "$argument" in
    --site-config=*) site=("$argument") ;;
    -h | --help) help=yes ;;
  esac
  previous=$argument
done

if [ -n "$help" ]; then
  python=${NEXTTRANSFORMER_VENV:-$folder/../.venv}/bin/python3
  [ -x "$python" ] || python=python3
  exec "$python" -m nexttransformer.launch --help
fi

# A function, since a bare `source FILE` would hand this script's own arguments on.
load_environment() {
  # shellcheck source=launch/env.sh
  source "$folder/env.sh" "$@"
}
load_environment ${site[@]+"${site[@]}"} || exit 2
exec python3 -m nexttransformer.launch "$@"
