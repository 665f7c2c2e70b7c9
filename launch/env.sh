# Sourced in bash or zsh, from any folder: source launch/env.sh [--site-config FILE]
#
# Checks the site file, puts the installed environment first on PATH and exports paths, caches and
# switches. It never exits the calling shell or changes its options: on an error it prints what is
# wrong and returns 2. Without --site-config the file is found as every command finds it:
# NEXTTRANSFORMER_SITE_CONFIG, then site.local.json in the current folder.
# NEXTTRANSFORMER_VENV names an environment other than .venv beside launch/.

_nexttransformer_fail() {
  printf 'launch/env.sh: %s\n' "$1" >&2
  return 2
}

# Arguments: this file, then those of the caller.
_nexttransformer_env() {
  local root venv python site exports
  root=$(CDPATH='' builtin cd -- "$(command dirname -- "$1")/.." >/dev/null && builtin pwd -P) || {
    _nexttransformer_fail "cannot find its own folder."
    return 2
  }
  shift
  site=
  while [ "$#" -gt 0 ]; do
    case "$1" in
      --site-config)
        [ "$#" -ge 2 ] || { _nexttransformer_fail "--site-config needs a file name."; return 2; }
        site=$2
        shift 2
        ;;
      --site-config=*)
        site=${1#--site-config=}
        shift
        ;;
      *)
        _nexttransformer_fail "unknown argument '$1': expected --site-config FILE."
        return 2
        ;;
    esac
  done

  venv=${NEXTTRANSFORMER_VENV:-$root/.venv}
  case "$venv" in
    /*) ;;
    *) venv=$PWD/$venv ;;
  esac
  python=$venv/bin/python
  if [ ! -x "$python" ]; then
    # A container may hold the package in its own Python.
    python=$(command -v python3 2>/dev/null) || python=
    if [ -n "${NEXTTRANSFORMER_VENV:-}" ] || [ -z "$python" ]; then
      _nexttransformer_fail "no environment in $venv. Run: bash $root/launch/install.sh --cpu (or --gpu)"
      return 2
    fi
    venv=
  fi
  if ! "$python" -c 'import nexttransformer, pydantic' >/dev/null 2>&1; then
    _nexttransformer_fail "NextTransformer is not installed for $python. Run: bash $root/launch/install.sh --cpu (or --gpu)"
    return 2
  fi
  if [ -n "$site" ]; then
    exports=$("$python" -m nexttransformer.site_config --shell "$site") || return 2
  else
    exports=$("$python" -m nexttransformer.site_config --shell) || return 2
  fi

  eval "$exports"
  if [ -n "$venv" ]; then
    case "$PATH:" in
      "$venv/bin:"*) ;;
      *) export PATH="$venv/bin:$PATH" ;;
    esac
    export VIRTUAL_ENV="$venv"
  fi
  # Linear and hybrid methods use the registered FLA Triton kernels; read once, at the first import of fla.
  export FLA_DISABLE_BACKEND_DISPATCH=1
  # Seconds that launchers leave a stopping trainer to save (torch 2.12 and later; its own default is 30).
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
}

if [ -n "${ZSH_VERSION:-}" ]; then
  # Hidden from bash, which cannot parse it.
  eval '_nexttransformer_file=${(%):-%x}'
elif [ -n "${BASH_VERSION:-}" ]; then
  _nexttransformer_file=${BASH_SOURCE[0]}
  if [ "$_nexttransformer_file" = "$0" ]; then
    _nexttransformer_fail "is sourced, not run: source $0 --site-config site.local.json"
    exit 2
  fi
else
  _nexttransformer_fail "needs bash or zsh."
  return 2
fi

if _nexttransformer_env "$_nexttransformer_file" "$@"; then
  unset -f _nexttransformer_env _nexttransformer_fail
  unset _nexttransformer_file
  return 0
else
  unset -f _nexttransformer_env _nexttransformer_fail
  unset _nexttransformer_file
  return 2
fi
