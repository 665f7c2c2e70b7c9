"""Versions of everything that decides numbers, and facts about this process's device."""

import hashlib
import importlib.metadata
import importlib.util
import os
import platform

import torch
from torch.cuda.nccl import version as nccl_version

from nexttransformer import __version__

_PACKAGES = {"triton": "triton", "fla": "fla-core", "accelerate": "accelerate"}


def package_version(name: str) -> str | None:
    """Returns the installed version of a distribution, None where it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Returns versions of python, torch, cuda, nccl, driver, triton, fla, accelerate and this package."""
    has_cuda = torch.cuda.is_available()
    nccl = nccl_version() if has_cuda and torch.distributed.is_nccl_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else None,
        "driver": _driver_version() if has_cuda else None,
        **{key: package_version(name) for key, name in _PACKAGES.items()},
        "package": __version__,
    }


def device_name(device: torch.device) -> str:
    """Returns the GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def host_hash(run_id: str, host: str) -> str:
    """Returns what run files call a host: 16 hex digits of SHA-256 over run id and host name."""
    return hashlib.sha256(f"{run_id}{host}".encode()).hexdigest()[:16]


def kernel_switch() -> str | None:
    """Returns FLA_DISABLE_BACKEND_DISPATCH as set for this process."""
    return os.environ.get("FLA_DISABLE_BACKEND_DISPATCH")


def _driver_version() -> str | None:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        return None
    # "NVRM version: NVIDIA UNIX ... Kernel Module  570.86.15  <date>": the first word that is a version.
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)
