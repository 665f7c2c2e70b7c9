#!/usr/bin/env bash
# Optional: trains on an own list of SSH hosts through DeepSpeed's launcher. Nothing else depends on DeepSpeed.
#
#   launch/deepspeed.sh --hostfile hosts.txt --config configs/linear/gdn.json --site-config site.local.json \
#     --output runs/gdn --micro-batch 16 --formal
#
# The hostfile has a line for every node: name slots=GPUS, the same number on each. Options of DeepSpeed's launcher
# stand first: --hostfile (needed), --include, --exclude, --num_nodes, --num_gpus, --master_addr, --master_port,
# --ssh_port (22), --launcher, --launcher_args. Every node needs this folder, the environment, data and output at the
# same paths, SSH without a password, and pdsh on this machine. To stop, create OUTPUT/stop_requested: the run saves
# and ends. It only starts processes; the trainer is the same.
set -euo pipefail

folder=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
fail() {
  printf 'deepspeed: %s\n' "$*" >&2
  exit 2
}

launcher=()
hostfile=
port=(--ssh_port 22)
while [ "$#" -gt 0 ]; do
  case "$1" in
    --hostfile | --include | --exclude | --num_nodes | --num_gpus | --master_addr | --master_port | --ssh_port | \
      --launcher | --launcher_args)
      [ "$#" -ge 2 ] || fail "$1 needs a value."
      [ "$1" != --hostfile ] || hostfile=$2
      [ "$1" != --ssh_port ] || port=()
      launcher+=("$1" "$2")
      shift 2
      ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) break ;;
  esac
done
[ -n "$hostfile" ] || fail "--hostfile is missing. Give it before the trainer's arguments, with lines like: node1 slots=8"
[ -f "$hostfile" ] || fail "--hostfile $hostfile: no such file."
problem=$(awk '
  /^[[:space:]]*(#|$)/ { next }
  !/^[^[:space:]]+[[:space:]]+slots=[1-9][0-9]*[[:space:]]*(#.*)?$/ {
    printf "line %d: expected NAME slots=GPUS, got \"%s\".", NR, $0; exit
  }
  $1 in seen { printf "line %d: %s is listed twice.", NR, $1; exit }
  { seen[$1] = 1; split($2, part, "=")
    if (slots && part[2] != slots) { printf "line %d: %s has %d slots, the others %d. Give all the same.", NR, $1, part[2], slots; exit }
    slots = part[2] }
  END { if (NR && !slots) printf "no host in it." }' "$hostfile")
[ -s "$hostfile" ] || problem="no host in it."
[ -z "$problem" ] || fail "$hostfile: $problem"

site=()
previous=
for argument in "$@"; do
  [ "$previous" != --site-config ] || site=(--site-config "$argument")
  case "$argument" in --site-config=*) site=("$argument") ;; esac
  previous=$argument
done
# A function, since a bare `source FILE` would hand this script's own arguments on.
load_environment() {
  # shellcheck source=launch/env.sh
  source "$folder/env.sh" "$@"
}
load_environment ${site[@]+"${site[@]}"} || exit 2
command -v deepspeed >/dev/null ||
  fail "DeepSpeed is not installed here. Run: uv pip install deepspeed, or use launch/slurm.sbatch or launch/node.sh."
python3 -c 'import sys; from nexttransformer.errors import run_command
from nexttransformer.training.options import parse_options
run_command(lambda argv: parse_options(argv or [], {}) and 0, sys.argv[1:])' "$@" || exit 2

# DeepSpeed starts the nodes through ssh, where this shell's variables are not known: it sends those of this file.
export DS_ENV_FILE
DS_ENV_FILE=$(mktemp "${TMPDIR:-/tmp}/nexttransformer-deepspeed.XXXXXX")
trap 'rm -f "$DS_ENV_FILE"' EXIT
env | grep -E '^(NEXTTRANSFORMER_|TORCHINDUCTOR_CACHE_DIR=|TRITON_CACHE_DIR=|FLA_|NCCL_|GLOO_|OMP_NUM_THREADS=)' >"$DS_ENV_FILE"
deepspeed "${launcher[@]}" ${port[@]+"${port[@]}"} --no_local_rank --module nexttransformer.train "$@"
