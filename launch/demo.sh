#!/usr/bin/env bash
# The whole path in minutes on a CPU: install, prepare the bundled text, train a registered method under the tiny
# demo-v1 protocol, evaluate, audit, export, report. Repeating it is safe and continues where it was interrupted.
#
#   bash launch/demo.sh
#
#   NEXTTRANSFORMER_DEMO_DIR  where everything it makes goes (default: ./demo)
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
demo=${NEXTTRANSFORMER_DEMO_DIR:-demo}
method=dense_full
config=$root/configs/baseline/$method.json
run=$demo/runs/$method

number=0
step() {
  number=$((number + 1))
  printf '\n[%d/%d] %s\n' "$number" 6 "$1"
}
trap 'printf "\nThe demo stopped at this step. Repeat the command to go on, or remove %s to start anew.\n" "$demo" >&2' ERR

bash "$root/launch/install.sh"
started=$SECONDS
mkdir -p "$demo"
printf '{"data_root": "data", "cache_root": "cache", "scratch_root": "scratch"}\n' >"$demo/site.json"
load_environment() {
  # shellcheck source=launch/env.sh
  source "$root/launch/env.sh" --site-config "$demo/site.json"
}
load_environment
# Each process of its own would take all cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(python3 -c 'import os; print(min(8, len(os.sched_getaffinity(0))))')}
# Threads that wait without spinning: on a machine that others use too, spinning made updates five times slower.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

step "Text to tokenizer and packed rows"
python3 -m nexttransformer.prepare_data --protocol demo-v1 --site-config "$demo/site.json"

step "Training $method: 140 updates"
# Four rows at a time fit the caches of a CPU: 0.9 s of one core an update, against 1.4 s with all 16.
"$root/launch/train.sh" --config "$config" --protocol demo-v1 --site-config "$demo/site.json" \
  --output "$run" --micro-batch 4

step "Evaluating the last checkpoint alone: BPB and CORE"
checkpoint=$(ls -d "$run"/checkpoint_* | grep -E 'checkpoint_[0-9]{8}$' | sort | tail -n 1)
python3 -m nexttransformer.evaluate --checkpoint "$checkpoint" --site-config "$demo/site.json" \
  --output "$run/evaluation.json" --micro-batch 4 --eval bpb,core

step "Auditing the run"
# Inside the demo's folder: its evidence is no part of the repository's.
(cd "$demo" && python3 -m nexttransformer.audit_run "runs/$method" --method "$method" --protocol demo-v1 \
  --data data/demo-v1)

step "Exporting record, weights and model card"
(cd "$demo" && python3 -m nexttransformer.export_run "runs/$method" --method "$method" \
  --name "Dense Baseline (demo)" --audit "evidence/demo/audits/$method.json" --export-dir "export/$method")

step "Report page"
python3 -m nexttransformer.report "$run" --output "$demo/report.html"

trap - ERR
printf '\nDone in %d s after installation. Made in %s:\n' "$((SECONDS - started))" "$demo"
for made in "data/demo-v1" "runs/$method" "evidence/demo/audits/$method.json" "evidence/demo/runs/$method.json" \
  "export/$method" "report.html"; do
  [ ! -e "$demo/$made" ] || printf '  %s\n' "$made"
done
cat <<TEXT

Open $demo/report.html in a browser. Next, train another method on the same data and compare the two:
  source launch/env.sh --site-config $demo/site.json
  launch/train.sh --config configs/hybrid/gdn_hybrid.json --protocol demo-v1 --output $demo/runs/gdn_hybrid --micro-batch 4
  python -m nexttransformer.report $run $demo/runs/gdn_hybrid --output $demo/compare.html
Or read what the tiny model writes:
  python -m nexttransformer.generate --checkpoint $checkpoint --prompt "The " --max-tokens 40
TEXT
