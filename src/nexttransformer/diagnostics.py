"""What `doctor` looks at: environment, GPUs, site, data, CORE bundle, disk and network (kernels: `kernel_report`).

Each check returns findings; a finding says what it saw and, unless all is well, what to do about it.
"""

import platform
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from nexttransformer import launch_environment, site_config
from nexttransformer.data.manifest import check_protocol, load_manifest
from nexttransformer.errors import NextTransformerError
from nexttransformer.evaluation.bundle import EXCERPT_FOLDER, load_bundle
from nexttransformer.ops import backends
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, EXCERPT_BUNDLE, PROTOCOLS, get_protocol
from nexttransformer.site_config import SiteConfig
from nexttransformer.training.versions import versions

OK, NOTE, FAIL = "ok", "note", "fail"
_TORCH_RANGE = ("2.11", "2.14")
_PYTHON_RANGE = ((3, 10), (3, 13))
_GIB = 2**30
# A formal checkpoint with optimizer states takes about 16 GiB, and two exist while one replaces another.
_RUN_GIB = 50
_CACHE_GIB = 5
_NETWORK_VARIABLES = ("NCCL_", "GLOO_", "FI_", "OMPI_", "SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NODEID")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        area: heading it belongs to.
        status: "ok"; "note" (worth knowing, nothing fails); "fail" (something will not work).
        text: what was seen.
        action: what to do about it; empty for "ok".
    """

    area: str
    status: str
    text: str
    action: str = ""


def environment() -> list[Finding]:
    """Python, torch and package versions; a torch without CUDA on a machine with an NVIDIA driver."""
    found = versions()
    area = "environment"
    text = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
    findings = [Finding(area, OK, text)]
    low, high = _PYTHON_RANGE
    version = tuple(map(int, platform.python_version_tuple()[:2]))
    if not low <= version <= high:
        wanted = " to ".join(".".join(map(str, bound)) for bound in _PYTHON_RANGE)
        findings.append(
            Finding(area, FAIL, f"Python {platform.python_version()}", f"Use Python {wanted}: bash launch/install.sh")
        )
    first, after = _TORCH_RANGE
    if backends.is_older(torch.__version__, first) or not backends.is_older(torch.__version__, after):
        wanted = f"Install torch >= {first}, < {after}: bash launch/install.sh"
        findings.append(Finding(area, FAIL, f"torch {torch.__version__}", wanted))
    if backends.driver_version() is not None and torch.version.cuda is None:
        cure = "Install the CUDA build: bash launch/install.sh --gpu --force"
        findings.append(Finding(area, FAIL, "this torch is CPU-only, but the machine has an NVIDIA driver", cure))
    return findings


def gpus() -> list[Finding]:
    """Visible GPUs with memory and capability."""
    area = "GPUs"
    if not torch.cuda.is_available():
        if torch.version.cuda is not None and backends.driver_version() is not None:
            cure = "Check CUDA_VISIBLE_DEVICES and that the driver is new enough for this CUDA (nvidia-smi)."
            return [Finding(area, FAIL, f"torch (CUDA {torch.version.cuda}) sees no GPU", cure)]
        return [Finding(area, NOTE, "no GPU: every method runs on the CPU in plain PyTorch", "Enough for demo-v1.")]
    findings = []
    names = set()
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        names.add(facts.name)
        free, total = (value / _GIB for value in torch.cuda.mem_get_info(index))
        text = f"{index}: {facts.name}, capability {facts.major}.{facts.minor}, {free:.0f} of {total:.0f} GiB free"
        is_busy = free < 0.9 * total
        findings.append(Finding(area, NOTE if is_busy else OK, text, "Another process uses it." if is_busy else ""))
        if facts.major < 8:
            cure = "bfloat16 needs capability 8.0 or higher: choose another GPU."
            findings.append(Finding(area, FAIL, f"{index}: capability {facts.major}.{facts.minor}", cure))
    if len(names) > 1:
        findings.append(
            Finding(area, NOTE, "GPUs of different kinds", "Use one kind in a run: the slowest sets the pace.")
        )
    return findings


def site(path: Path | None) -> tuple[SiteConfig | None, list[Finding]]:
    """The site file and its paths; a site that is not asked for may be absent."""
    area = "site"
    try:
        file = site_config.find_site_config(path)
    except NextTransformerError as error:
        status = NOTE if path is None else FAIL
        return None, [Finding(area, status, "no site file", line) for line in str(error).splitlines()]
    try:
        found = site_config.load_site_config(file)
    except NextTransformerError as error:
        return None, [Finding(area, FAIL, f"{file} cannot be used", line) for line in str(error).splitlines()]
    problems = [
        Finding(area, FAIL, "a path cannot be used", line) for line in site_config.path_problems(found, str(file))
    ]
    return found, [Finding(area, OK, str(file)), *problems]


def data(found: SiteConfig, wanted: str | None) -> list[Finding]:
    """Prepared data of every protocol under the site's data root; that of `wanted` must be there."""
    area = "data"
    findings = []
    for name, protocol in PROTOCOLS.items():
        folder = found.data_folder(name)
        cure = f"python -m nexttransformer.prepare_data --protocol {name}"
        if not folder.exists():
            if name == wanted:
                findings.append(Finding(area, FAIL, f"{name}: {folder} does not exist", cure))
            continue
        try:
            manifest = load_manifest(folder)
            check_protocol(manifest, protocol, folder=folder)
        except NextTransformerError as error:
            findings += [Finding(area, FAIL, line, cure) for line in str(error).splitlines()]
            continue
        files = [folder / split / file.name for split, facts in manifest.splits.items() for file in facts.files]
        absent = [file for file in files if not file.is_file()]
        if absent:
            findings.append(
                Finding(area, FAIL, f"{name}: {len(absent)} row files missing, first {absent[0].name}", cure)
            )
        else:
            rows = ", ".join(f"{split} {facts.rows} rows" for split, facts in manifest.splits.items())
            findings.append(Finding(area, OK, f"{name}: {rows}"))
    if not findings:
        cure = "python -m nexttransformer.prepare_data --protocol demo-v1 (minutes, no download), later formal-v1"
        findings.append(Finding(area, NOTE, f"nothing prepared under {found.data_root}", cure))
    return findings


def bundle(found: SiteConfig | None, wanted: str | None) -> list[Finding]:
    """The CORE bundle of the wanted protocol, or the shipped excerpt."""
    area = "CORE"
    try:
        load_bundle(EXCERPT_FOLDER, BUNDLE_TASKS_DIGESTS[EXCERPT_BUNDLE])
        findings = [Finding(area, OK, "the shipped excerpt is complete (demo-v1, test-v1)")]
    except NextTransformerError as error:
        findings = [Finding(area, FAIL, "the shipped excerpt is damaged; install again", str(error).splitlines()[0])]
    needed = get_protocol(wanted or "formal-v1").core_bundle
    if needed == EXCERPT_BUNDLE:
        return findings
    folder = found.core_bundle if found is not None else None
    if folder is None:
        cure = "Name the folder of the CORE data in the site file's 'core_bundle'."
        return [*findings, Finding(area, NOTE if wanted is None else FAIL, "no full CORE bundle", cure)]
    try:
        load_bundle(folder, BUNDLE_TASKS_DIGESTS[needed])
    except NextTransformerError as error:
        return [*findings, *(Finding(area, FAIL, "full CORE bundle", line) for line in str(error).splitlines())]
    return [*findings, Finding(area, OK, f"the full bundle is complete: {folder}")]


def disk(found: SiteConfig | None) -> list[Finding]:
    """Free space for runs, data and caches, on the nearest existing parent of each folder."""
    area = "disk"
    places = {"runs (current folder)": (Path.cwd(), _RUN_GIB)}
    if found is not None:
        places |= {"cache_root": (found.cache_root, _CACHE_GIB), "scratch_root": (found.scratch_root, _CACHE_GIB)}
        places["data_root"] = (found.data_root, _CACHE_GIB)
    findings = []
    for name, (folder, needed) in places.items():
        nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(nearest).free / _GIB
        is_low = free < needed
        cure = f"A formal run wants {needed} GiB here." if name.startswith("runs") else f"Keep {needed} GiB free."
        text = f"{name}: {free:.0f} GiB free at {nearest}"
        findings.append(Finding(area, NOTE if is_low else OK, text, cure if is_low else ""))
    return findings


def network(environ: Mapping[str, str]) -> list[Finding]:
    """Variables of a job over several nodes, and whether the main node's name can be resolved."""
    area = "network"
    findings = [
        Finding(area, FAIL, "variables that start a job", line) for line in launch_environment.job_problems(environ)
    ]
    shown = sorted(f"{name}={value}" for name, value in environ.items() if name.startswith(_NETWORK_VARIABLES))
    findings.append(Finding(area, OK, ", ".join(shown) or "no NCCL, GLOO or SLURM variables set"))
    address = environ.get("MASTER_ADDR")
    if address is None:
        return [*findings, Finding(area, OK, "one machine (MASTER_ADDR is not set)")]
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(address, None)})
        findings.append(Finding(area, OK, f"MASTER_ADDR {address} is {', '.join(addresses)}"))
    except OSError as error:
        cure = "Use a name or address that every node can resolve; test with: getent hosts NAME"
        findings.append(Finding(area, FAIL, f"MASTER_ADDR {address}: {error}", cure))
    return findings
