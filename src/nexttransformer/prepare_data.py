"""Command: text -> tokenizer, packed rows, manifest. Downloads, verifies, resumes; safe to repeat.

python -m nexttransformer.prepare_data --site-config site.local.json --protocol formal-v1
"""

import argparse
from pathlib import Path

from nexttransformer.data import download, published, shards, verify
from nexttransformer.data.manifest import load_manifest
from nexttransformer.data.pipeline import Request, figures, prepare
from nexttransformer.data.reporting import Reporter
from nexttransformer.data.workers import default_num_workers
from nexttransformer.errors import EXIT_FAILED, EXIT_OK, ConfigError, run_command
from nexttransformer.protocol import PROTOCOLS, Protocol, get_protocol
from nexttransformer.site_config import SiteConfig, load_site_config

BUNDLED_PROTOCOLS = ("demo-v1", "test-v1")


def main(argv: list[str] | None = None) -> int:
    """Prepares or verifies the data of one protocol; returns the exit code."""
    args = _parser().parse_args(argv)
    protocol = get_protocol(args.protocol)
    rows = _wanted_rows(args, protocol)
    site = load_site_config(args.site_config)
    reporter = Reporter()
    climbmix = None
    if args.source is not None:
        source = shards.folder_source(args.source)
    elif protocol.id in BUNDLED_PROTOCOLS:
        source = shards.bundled_source()
    else:
        num_ahead = download.estimate_shards(protocol, rows or protocol.num_rows)
        climbmix = download.ClimbMix(site.data_root / "climbmix", num_ahead=num_ahead, say=reporter.say)
        source = climbmix.source()
    request = Request(
        protocol=protocol,
        folder=site.data_folder(protocol.id),
        source=source,
        rows=rows,
        is_repeated=args.repeat,
        tokenizer=_tokenizer(site, protocol, reporter),
        num_workers=args.workers,
        is_published_checked=not args.publish,
    )
    try:
        if args.download_only:
            return _download_only(climbmix, request, reporter)
        if args.verify:
            return _verify(request, reporter)
        manifest = prepare(request, reporter)
    finally:
        if climbmix is not None:
            climbmix.close()
    if args.publish:
        reporter.say(f"Published in {published.publish(manifest, protocol, folder=request.folder)}.")
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prepare_data", description=__doc__, allow_abbrev=False)
    parser.add_argument("--site-config", type=Path, metavar="FILE", help="site file; data goes to its data_root")
    parser.add_argument("--protocol", default="formal-v1", metavar="ID", help=f"one of {', '.join(PROTOCOLS)}")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="local parquet files with a 'text' column")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--rows", type=int, metavar="N", help="training rows (default: what a whole run needs)")
    amount.add_argument("--updates", type=int, metavar="N", help="training rows for N updates")
    parser.add_argument("--repeat", action="store_true", help="let runs pass over the rows again (never formal)")
    parser.add_argument("--workers", type=int, default=default_num_workers(), metavar="N", help="processes")
    parser.add_argument("--verify", action="store_true", help="hash every prepared file again; exit 1 if any differs")
    parser.add_argument("--publish", action="store_true", help="maintainers: write the protocol's digests")
    parser.add_argument("--download-only", action="store_true", help="fetch shards, prepare nothing")
    return parser


def _wanted_rows(args: argparse.Namespace, protocol: Protocol) -> int | None:
    """Returns the training rows asked for, or None for the protocol's; refuses numbers below 1."""
    for name, value in (("--rows", args.rows), ("--updates", args.updates), ("--workers", args.workers)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: expected a whole number from 1.")
    return args.updates * protocol.global_batch_rows if args.updates is not None else args.rows


def _tokenizer(site: SiteConfig, protocol: Protocol, reporter: Reporter) -> Path | None:
    if site.tokenizer is not None and protocol.id in BUNDLED_PROTOCOLS:
        reporter.say(f"{protocol.id} trains its own small tokenizer: 'tokenizer' of the site file is ignored.")
        return None
    return site.tokenizer


def _download_only(climbmix: download.ClimbMix | None, request: Request, reporter: Reporter) -> int:
    if climbmix is None:
        raise ConfigError("--download-only: nothing to download, the text is already on this machine.")
    count = download.estimate_shards_to_fetch(request.protocol, request.num_rows)
    climbmix.num_ahead = count
    with reporter.bar("downloading", unit="shards", total=count + len(request.source.validation)) as bar:
        for name in (*request.source.validation, *request.source.training[:count]):
            request.source.fetch(name)
            bar.advance(1)
    reporter.say(f"{climbmix.folder}: {count} training shards (an estimate) and both validation shards are here.")
    return EXIT_OK


def _verify(request: Request, reporter: Reporter) -> int:
    manifest = load_manifest(request.folder)
    with reporter.bar("verifying", unit="bytes") as bar:
        problems = verify.deep_problems(
            request.folder, manifest, source=request.source, num_threads=request.num_workers, bar=bar
        )
    for problem in problems:
        reporter.say(problem)
    verdict = f"{len(problems)} problem(s). Prepare the data again." if problems else "every byte is as recorded."
    reporter.say(f"{request.folder}: {verdict} {figures(manifest, request)}")
    return EXIT_FAILED if problems else EXIT_OK


if __name__ == "__main__":
    run_command(main)
