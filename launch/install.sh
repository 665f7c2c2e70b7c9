#!/usr/bin/env bash
# Installs NextTransformer into an environment of its own. Repeating it is safe and quick.
#
#   bash launch/install.sh [--cpu | --gpu] [--force]
#
# Without a kind: the kind installed before, else --gpu where nvidia-smi lists a GPU, else --cpu.
# Versions come from constraints/cpu.txt or constraints/gpu.txt; where packages come from is your own pip
# configuration, which is left as it is.
#   NEXTTRANSFORMER_VENV    where the environment is (default: .venv beside launch/)
#   NEXTTRANSFORMER_PYTHON  the Python to make it with (default: the first of 3.10 to 3.13 found)
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
say() { printf 'install: %s\n' "$*"; }
fail() {
  printf 'install: %s\n' "$*" >&2
  exit 2
}

kind=
force=
for argument in "$@"; do
  case "$argument" in
    --cpu | --gpu)
      [ -z "$kind" ] || [ "$kind" = "${argument#--}" ] || fail "--cpu and --gpu exclude each other. Give one."
      kind=${argument#--}
      ;;
    --force) force=yes ;;
    -h | --help)
      sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    *) fail "unknown argument '$argument': expected --cpu, --gpu or --force." ;;
  esac
done

venv=${NEXTTRANSFORMER_VENV:-$root/.venv}
case "$venv" in
  /*) ;;
  *) venv=$PWD/$venv ;;
esac
record=$venv/install_key
if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" | grep -vx .install.lock)" ]; then
  fail "$venv exists and is no Python environment. Set NEXTTRANSFORMER_VENV to another folder."
fi

if [ -n "$kind" ]; then
  reason="as asked for"
elif [ -f "$record" ]; then
  kind=$(cut -d' ' -f1 "$record")
  reason="as installed before"
elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
  kind=gpu
  reason="nvidia-smi lists a GPU"
else
  kind=cpu
  reason="nvidia-smi lists no GPU"
fi
constraints=$root/constraints/$kind.txt

# An environment keeps its Python; a new one takes the first supported Python that runs and can make environments.
is_supported() {
  "$1" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}
python=
if is_supported "$venv/bin/python"; then
  python=$venv/bin/python
elif [ -n "${NEXTTRANSFORMER_PYTHON:-}" ]; then
  is_supported "$NEXTTRANSFORMER_PYTHON" || fail "NEXTTRANSFORMER_PYTHON=$NEXTTRANSFORMER_PYTHON: expected a Python 3.10 to 3.13."
  python=$NEXTTRANSFORMER_PYTHON
else
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if is_supported "$candidate"; then
      python=$candidate
      break
    fi
  done
  [ -n "$python" ] || fail "no Python 3.10 to 3.13 with the venv module found. Install one or set NEXTTRANSFORMER_PYTHON."
fi
version=$("$python" -c 'import platform; print(platform.python_version())')

# Everything that decides what gets installed. The stamp of the code is renewed in any case.
key="$kind $( { printf '%s\n' "$root" "$version"; cat "$constraints" "$root/pyproject.toml" "$root/src/nexttransformer/__init__.py"; } | sha256sum | cut -d' ' -f1)"
stamp_code() {
  "$venv/bin/python" -m nexttransformer.provenance --write-stamp >/dev/null
}
if [ -z "$force" ] && [ "$(cat "$record" 2>/dev/null)" = "$key" ] && stamp_code 2>/dev/null; then
  say "$venv is up to date ($kind, Python $version)."
  exit 0
fi

say "installing for $kind ($reason) into $venv with Python $version."
if command -v flock >/dev/null; then
  mkdir -p "$venv"
  exec 9>"$venv/.install.lock"
  flock -n 9 || { say "waiting for another installation into the same folder."; flock 9; }
fi
rm -f "$record"
if [ "$python" != "$venv/bin/python" ]; then
  clear=
  [ ! -f "$venv/pyvenv.cfg" ] || { clear=--clear; say "the environment there has no usable Python and is made anew."; }
  "$python" -m venv $clear "$venv" || fail "python -m venv failed. On Debian and Ubuntu: apt install python3-venv."
fi

has_cuda='import sys, torch; sys.exit(not (torch.version.cuda or torch.version.hip))'
extras=dev
installer=("$venv/bin/python" -m pip install --disable-pip-version-check)
if [ "$kind" = gpu ]; then
  extras=gpu,multinode,dev
  if "$venv/bin/python" -c 'import torch' 2>/dev/null && ! "$venv/bin/python" -c "$has_cuda"; then
    say "removing the torch without CUDA that is there."
    "$venv/bin/python" -m pip uninstall -q -y torch
  fi
  if ! command -v uv >/dev/null; then
    say "using pip: uv is not installed."
  elif "$venv/bin/python" -m pip config list 2>/dev/null | grep -qE 'index-url|find-links|no-index'; then
    say "using pip: it has package sources of its own, which uv would not read."
  else
    say "using uv: faster, and its default source has the CUDA builds."
    installer=(uv pip install --python "$venv/bin/python")
  fi
else
  # uv would take a CUDA build of several gigabytes where pip's own settings offer a CPU build.
  say "using pip: it keeps your own package sources, so that a CPU build of torch is taken where they have one."
fi
(cd "$root" && "${installer[@]}" -c "constraints/$kind.txt" -e ".[$extras]") ||
  fail "the installer failed (its own message is above). Check network and pip settings, then repeat the command."
if [ "$kind" = gpu ] && ! "$venv/bin/python" -c "$has_cuda"; then
  fail "the torch that your package source offers has no CUDA. Point pip at a source with CUDA builds, then repeat."
fi

stamp_code || fail "the installed package does not start (message above)."
printf '%s\n' "$key" >"$record"
say "done: $("$venv/bin/python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda or "none")'), $(du -sh "$venv" | cut -f1) in $venv."
say "next: cp site.example.json site.local.json, then source launch/env.sh --site-config site.local.json"
