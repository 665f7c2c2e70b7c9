#!/usr/bin/env bash
# One node of a job over several nodes: run the same command on every node, with five variables.
#
#   NNODES=2 GPUS_PER_NODE=8 NODE_RANK=0 MASTER_ADDR=head MASTER_PORT=29500 \
#     launch/node.sh --config configs/linear/gdn.json --site-config site.local.json \
#     --output runs/gdn --micro-batch 16 --formal
#
# It is the accelerate command of the quick start, with everything checked before anything waits for another node.
# NODE_RANK counts from 0; MASTER_ADDR and MASTER_PORT are node 0's. Works without sourcing launch/env.sh first.
# The exit code is the trainer's: 0 finished or stopped and saved, 1 failed, 2 refused.
set -euo pipefail
# It would end a launcher and leave the trainer behind; the trainer has a handler of its own.
trap '' USR1

folder=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
site=()
previous=
for argument in "$@"; do
  [ "$previous" != --site-config ] || site=(--site-config "$argument")
  case "$argument" in
    --site-config=*) site=("$argument") ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
  esac
  previous=$argument
done

# A function, since a bare `source FILE` would hand this script's own arguments on.
load_environment() {
  # shellcheck source=launch/env.sh
  source "$folder/env.sh" "$@"
}
load_environment ${site[@]+"${site[@]}"} || exit 2
exec python3 -m nexttransformer.launch_node "$folder/accelerate.yaml" "$@"
