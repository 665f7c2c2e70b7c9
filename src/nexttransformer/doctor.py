"""Command: checks environment, GPUs, kernels, site, data, disk and network; says what to do about each failure."""

import argparse
import os
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from nexttransformer import diagnostics, jsonio, kernel_report
from nexttransformer.diagnostics import FAIL, NOTE, Finding
from nexttransformer.errors import EXIT_FAILED, EXIT_OK, ConfigError, run_command
from nexttransformer.ops.path_check import PathCheck
from nexttransformer.ops.probes import probe_names
from nexttransformer.protocol import PROTOCOLS, get_protocol
from nexttransformer.site_config import default_cache_root
from nexttransformer.training.collectives import SingleProcess
from nexttransformer.training.kernel_tuning import KernelTuning

_MARKS = {"ok": "[green]ok  [/]", NOTE: "[yellow]note[/]", FAIL: "[red]FAIL[/]"}


def main(argv: list[str] | None = None) -> int:
    """Runs every check; 0 if nothing fails, 1 if something does, 2 for a wrong option."""
    arguments = _parser().parse_args(argv)
    if arguments.protocol is not None:
        get_protocol(arguments.protocol)
    console = Console(highlight=False, soft_wrap=True)
    site, site_findings = diagnostics.site(arguments.site_config)
    findings = [
        *diagnostics.environment(),
        *diagnostics.gpus(),
        *kernel_report.kernel_versions(),
        *site_findings,
        *(diagnostics.data(site, arguments.protocol) if site is not None else []),
        *diagnostics.bundle(site, arguments.protocol),
        *diagnostics.disk(site),
        *diagnostics.network(os.environ),
    ]
    checks: list[PathCheck] = []
    if arguments.kernels and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        ops = arguments.op or probe_names()
        cache_root = site.cache_root if site is not None else default_cache_root()
        tuning = KernelTuning(SingleProcess(), device, cache_root=cache_root)
        checks, found = kernel_report.check_all_kernels(
            console, ops, head_dim=arguments.head_dim, device=device, tuner=tuning
        )
        findings += found + [Finding("kernels", NOTE, note) for note in tuning.notes]
    elif torch.cuda.is_available():
        cure = "doctor --kernels compares every fused operation with its reference (minutes the first time)."
        findings.append(Finding("kernels", NOTE, "not measured", cure))
    for finding in findings:
        console.print(f"{_MARKS[finding.status]} {finding.area:<12} {escape(finding.text)}")
        if finding.action:
            console.print(f"                  -> {escape(finding.action)}")
    failed = sum(finding.status == FAIL for finding in findings)
    console.print(f"\n{failed} problem{'s' * (failed != 1)} found." if failed else "\nNo problem found.")
    if arguments.json is not None:
        record = {
            "findings": [vars(finding) for finding in findings],
            "kernels": [vars(check) for check in checks],
        }
        try:
            jsonio.write_json_atomic(arguments.json, record)
        except OSError as problem:
            reason = f"cannot be written: {problem.strerror}. Choose another file."
            raise ConfigError(f"--json {str(arguments.json)[:200]}: {reason}") from None
    return EXIT_FAILED if failed else EXIT_OK


def _head_dim(text: str) -> int:
    if text not in ("64", "128"):
        raise ConfigError(f"--head-dim {text}: expected 64 or 128.")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nexttransformer.doctor", description=__doc__)
    parser.add_argument("--site-config", type=Path, help="site file; default: as every command finds it")
    parser.add_argument("--protocol", help=f"what must be ready for a run: {', '.join(PROTOCOLS)}")
    parser.add_argument("--kernels", action="store_true", help="measure every fused kernel against its reference")
    parser.add_argument("--op", action="append", choices=probe_names(), help="only this operation; repeatable")
    parser.add_argument("--head-dim", type=_head_dim, default=128, help="key and value dim of --kernels: 128 or 64")
    parser.add_argument("--json", type=Path, help="also write the findings and kernel ratios to this file")
    return parser


if __name__ == "__main__":
    run_command(main)
