"""The site file (`site.local.json`): where data, tokenizer, CORE bundle, caches and scratch space are on this machine.

It is never committed and never part of a result. `site.example.json` documents every key in its
`_about` object; a site file may keep or drop that object.
"""

import argparse
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nexttransformer import jsonio
from nexttransformer.config import validation_problems
from nexttransformer.errors import ConfigError, join_problems, run_command, suggest

SITE_VARIABLE = "NEXTTRANSFORMER_SITE_CONFIG"
DEFAULT_NAME = "site.local.json"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_OPTIONAL_PATHS = ("tokenizer", "core_bundle")
_PATHS = ("data_root", *_OPTIONAL_PATHS, "cache_root", "scratch_root")


def default_cache_root() -> Path:
    """Returns the cache folder used where the site file names none."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nexttransformer"


def default_scratch_root() -> Path:
    """Returns the scratch folder used where the site file names none."""
    return Path(tempfile.gettempdir()) / "nexttransformer"


class SiteConfig(BaseModel):
    """A checked site file; all paths are absolute.

    Attributes:
        about: documentation of the keys (`_about`); not used.
        data_root: folder of prepared data, one sub-folder per protocol.
        tokenizer: tokenizer file to use and verify; None: the one beside the prepared data.
        core_bundle: folder or archive of the CORE data; None: the default of `evaluate`.
        cache_root: compile caches, on a node-local disk.
        scratch_root: large temporary files.
        trackers: optional run trackers, in addition to the local files.
        tracker_project: project name given to trackers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    about: dict[str, str] = Field(default_factory=dict, alias="_about")
    data_root: Path = Field(strict=False)
    tokenizer: Path | None = Field(default=None, strict=False)
    core_bundle: Path | None = Field(default=None, strict=False)
    cache_root: Path = Field(default_factory=default_cache_root, strict=False)
    scratch_root: Path = Field(default_factory=default_scratch_root, strict=False)
    trackers: list[Literal["wandb", "tensorboard", "trackio"]] = Field(default_factory=list)
    tracker_project: str = Field(default="nexttransformer", min_length=1)

    def data_folder(self, protocol_id: str) -> Path:
        """Returns the folder of a protocol's prepared data."""
        return self.data_root / protocol_id


def site_keys() -> list[str]:
    """Returns every key a site file may hold, `_about` excepted."""
    return sorted(name for name in SiteConfig.model_fields if name != "about")


def find_site_config(path: Path | None = None) -> Path:
    """Returns the site file to use: the given one, else that of the environment variable, else ./site.local.json.

    Raises:
        ConfigError: if none is there, naming all three places.
    """
    if path is not None:
        found, origin = path, "--site-config"
    elif os.environ.get(SITE_VARIABLE):
        found, origin = Path(os.environ[SITE_VARIABLE]), SITE_VARIABLE
    elif Path(DEFAULT_NAME).is_file():
        return Path(DEFAULT_NAME).absolute()
    else:
        raise ConfigError(
            f"No site file: --site-config is not given, {SITE_VARIABLE} is not set and {DEFAULT_NAME} is not in "
            f"{Path.cwd()}. Copy site.example.json to {DEFAULT_NAME} and set 'data_root'."
        )
    if not found.is_file():
        raise ConfigError(f"{found}: no such site file ({origin}). Copy site.example.json there and set 'data_root'.")
    return found.absolute()


def load_site_config(path: Path | None = None) -> SiteConfig:
    """Reads and checks a site file (see `find_site_config` for None), reporting all of its problems together.

    Relative paths count from the file's folder; `~` and `$NAME` in paths are expanded.

    Raises:
        ConfigError: naming file, key, value, what was expected and the nearest choice.
    """
    file = find_site_config(path)
    data = jsonio.read_json(file)
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a JSON object. See site.example.json.")
    problems: list[str] = []
    values = {key: _resolve(value, key, file, problems) if key in _PATHS else value for key, value in data.items()}
    problems += _about_problems(values.get("_about"), str(file))
    try:
        site = SiteConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(join_problems(problems + validation_problems(error, str(file), SiteConfig))) from None
    if problems:
        raise ConfigError(join_problems(problems))
    return site


def path_problems(site: SiteConfig, where: str) -> list[str]:
    """Returns one line for each path of a site that cannot be what its key says."""
    problems = []
    for key in (*_OPTIONAL_PATHS, "data_root", "cache_root", "scratch_root"):
        path: Path | None = getattr(site, key)
        try:
            problem = _path_problem(key, path) if path is not None else None
        except OSError as error:
            problem = f"cannot be used: {error.strerror} ({str(path)[:80]}). Choose another path."
        if problem:
            problems.append(f"{where}: '{key}': {problem}")
    return problems


def _path_problem(key: str, path: Path) -> str | None:
    """Returns what is wrong with one path; OSError where the system refuses it (too long, no permission)."""
    if key == "tokenizer":
        return None if path.is_file() else f"{path} is not a file. Correct the path or set it to null."
    if key == "core_bundle":
        return None if path.exists() else f"{path} is not there. Correct it or set it to null."
    nearest = next(parent for parent in (path, *path.parents) if parent.exists() or parent.is_symlink())
    if nearest.is_symlink() and not nearest.exists():
        return f"{nearest} is a link that leads nowhere. Correct the link or choose another path."
    if not nearest.is_dir():
        return f"{nearest} is a file, expected a folder. Choose another path."
    if path != nearest and not os.access(nearest, os.W_OK):
        return f"{path} does not exist and {nearest} is not writable. Choose another."
    return None


def environment(site: SiteConfig, file: Path) -> dict[str, str]:
    """Returns the variables that `launch/env.sh` exports for a site."""
    return {
        SITE_VARIABLE: str(file),
        "TORCHINDUCTOR_CACHE_DIR": str(site.cache_root / "inductor"),
        "TRITON_CACHE_DIR": str(site.cache_root / "triton"),
    }


def _resolve(value: Any, key: str, file: Path, problems: list[str]) -> Path | None:
    """Returns a path value made absolute; a bad one becomes a problem and the file's folder."""
    if value is None and key in _OPTIONAL_PATHS:
        return None
    if not isinstance(value, str) or not value:
        got = jsonio.canonical_bytes(value).decode("utf-8")[:80]
        choice = " or null" if key in _OPTIONAL_PATHS else ""
        problems.append(f"{file}: '{key}': got {got}, expected a path in quotes{choice}.")
        return file.parent
    names = {first or second for first, second in _VARIABLE.findall(value)}
    unset = sorted(name for name in names if not os.environ.get(name))
    problems += [f"{file}: '{key}': ${name} is not set. Export it or write the path out." for name in unset]
    if "\0" in value:
        problems.append(f"{file}: '{key}': holds a zero character, expected a path. Remove it.")
        return file.parent
    try:
        return file.parent / Path(os.path.expandvars(value)).expanduser()
    except RuntimeError:
        user = Path(value).parts[0]
        problems.append(f"{file}: '{key}': {user} is no user with a home folder here. Write the path out.")
        return file.parent


def _about_problems(about: Any, where: str) -> list[str]:
    if not isinstance(about, dict):
        return []
    unknown = sorted(set(about) - set(site_keys()))
    return [f"{where}: '_about' explains an unknown key '{key}'.{suggest(key, site_keys())}" for key in unknown]


def main(argv: list[str] | None = None) -> int:
    """Checks a site file; `--shell` prints the exports that `launch/env.sh` evaluates."""
    parser = argparse.ArgumentParser(prog="python -m nexttransformer.site_config", description=main.__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="site file; default: as every command finds it")
    parser.add_argument("--shell", action="store_true", help="print export commands instead of the values")
    arguments = parser.parse_args(argv)
    file = find_site_config(arguments.file)
    site = load_site_config(file)
    problems = path_problems(site, str(file))
    if problems:
        raise ConfigError(join_problems(problems))
    if arguments.shell:
        for name, value in environment(site, file).items():
            print(f"export {name}={shlex.quote(value)}")
    else:
        for key in site_keys():
            value = getattr(site, key)
            print(f"{key}: {'null' if value is None else value}")
    return 0


if __name__ == "__main__":
    run_command(main)
