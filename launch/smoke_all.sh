#!/usr/bin/env bash
# Two updates of every registered method (or of those named), one GPU each and as many side by side as there are
# GPUs, then one line each: loss, tokens/s, memory, time of the first update. Repeat it to continue what is missing.
#
#   launch/smoke_all.sh --site-config site.local.json --output runs/smoke [METHOD ...]
#
#   --site-config FILE  as for training
#   --output DIR        one run folder and one log for each method
#   --micro-batch N     rows per GPU and pass (default 8)
#   --protocol ID       default formal-v1
#
# Ctrl-C stops the runs as for training, and no other method is started.
# Exit code 0 if all methods finished, 1 if one did not, 2 for a wrong argument.
set -uo pipefail

fail() {
  printf 'launch/smoke_all.sh: %s\n' "$1" >&2
  exit 2
}
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
site=() output='' micro_batch=8 protocol=formal-v1 methods=()
while [ "$#" -gt 0 ]; do
  case "$1" in
    -h | --help)
      sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --site-config | --output | --micro-batch | --protocol)
      [ "$#" -ge 2 ] || fail "$1 needs a value."
      case "$1" in
        --site-config) site=(--site-config "$2") ;;
        --output) output=$2 ;;
        --micro-batch) micro_batch=$2 ;;
        --protocol) protocol=$2 ;;
      esac
      shift 2
      ;;
    -*) fail "unknown option '$1': expected --site-config, --output, --micro-batch or --protocol." ;;
    *)
      methods+=("$1")
      shift
      ;;
  esac
done
[ -n "$output" ] || fail "--output DIR is missing: the folder for the runs."
[[ "$micro_batch" =~ ^[1-9][0-9]{0,2}$ ]] || fail "--micro-batch $micro_batch: expected a whole number from 1 to 999."
load_environment() {
  # shellcheck source=launch/env.sh
  source "$root/launch/env.sh" "$@"
}
load_environment ${site[@]+"${site[@]}"} || exit 2

problem=$(python3 -c 'import sys
from nexttransformer.errors import NextTransformerError
from nexttransformer.protocol import get_protocol
try:
    get_protocol(sys.argv[1])
except NextTransformerError as error:
    print(error)' "$protocol") || exit 2
[ -z "$problem" ] || fail "$problem"
known=$(cd "$root/configs" && for file in */*.json; do basename "$file" .json; done)
for method in ${methods[@]+"${methods[@]}"}; do
  grep -qxF "$method" <<<"$known" || fail "no method '$method': expected some of $(tr '\n' ' ' <<<"$known")"
done
[ "${#methods[@]}" -gt 0 ] || mapfile -t methods <<<"$known"
{ mkdir -p "$output" && : >>"$output/.lock"; } 2>/dev/null || fail "--output $output: cannot be made or written to."
# Held by the runs too. Exit code 1 is a lock that is taken; a file system without locks is no reason to stop.
exec 9>>"$output/.lock"
flock -n 9 2>/dev/null || [ "$?" != 1 ] || fail "--output $output: another launch/smoke_all.sh is running there."
IFS=, read -r -a gpus <<<"$(python3 -c 'import os, torch
num_gpus, given = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
print(",".join((given.split(",") if given else [str(gpu) for gpu in range(num_gpus)])[:num_gpus]))')"
[ "${#gpus[@]}" -gt 0 ] || gpus=("")

# One method on one GPU; its output goes to a log, its end to the terminal.
smoke() {
  local method=$1 gpu=${gpus[$SLOT]} code=0
  # Without a GPU the launcher itself sees whether that is meant.
  [ -z "$gpu" ] || export CUDA_VISIBLE_DEVICES=$gpu
  NPROC_PER_NODE=1 "$root/launch/train.sh" --config "$(ls "$root"/configs/*/"$method.json")" \
    ${site[@]+"${site[@]}"} --output "$output/$method" --protocol "$protocol" --micro-batch "$micro_batch" \
    --smoke-steps 2 >"$output/$method.log" 2>&1 || code=$?
  [ "$code" = 0 ] && printf '%s: done\n' "$method" ||
    printf '%s: exit code %d: %s\n' "$method" "$code" "$(tail -n 1 "$output/$method.log")"
  return "$code"
}

# A worker per GPU takes the next method that nobody has taken.
taken=$(mktemp -d) || exit 1
trap 'rm -rf "$taken"' EXIT
trap 'touch "$taken/failed" "$taken/stopped"' INT
for SLOT in "${!gpus[@]}"; do
  for method in "${methods[@]}"; do
    # Set again: a shell in the background would ignore it, and so would the run.
    trap : INT
    [ ! -e "$taken/stopped" ] || break
    mkdir "$taken/$method" 2>/dev/null || continue
    smoke "$method" || touch "$taken/failed"
  done &
done
until wait; do :; done
finished=()
for method in "${methods[@]}"; do
  [ ! -f "$output/$method/run.json" ] || finished+=("$output/$method")
done
[ "${#finished[@]}" = 0 ] || python3 -m nexttransformer.report "${finished[@]}" --output "$output/report.html"
[ ! -e "$taken/failed" ]
