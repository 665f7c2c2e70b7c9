"""Command: judges the record and audit that a branch adds. Exit code 0: accepted; 1: refused; 2: cannot judge."""

import argparse
from pathlib import Path

from nexttransformer.errors import ConfigError, run_command

# Tried in this order where --base is left out.
BASES = ("origin/main", "main")


def main(argv: list[str] | None = None) -> int:
    """Compares a commit with its merge base and prints every finding."""
    arguments = _parser().parse_args(argv)
    # Imported here: the help should not wait for torch.
    from nexttransformer.submission.gate import judge
    from nexttransformer.submission.git_tree import GitRepository
    from nexttransformer.submission.subject import EVIDENCE, SITE, Subject

    repository = GitRepository(arguments.repository)
    base = arguments.base or next((name for name in BASES if repository.has(name)), None)
    if base is None:
        raise ConfigError(f"No branch {' or '.join(BASES)} here. Name the branch to merge into with --base.")
    subject = Subject.open(repository, base=base, head=arguments.head, division=arguments.division)
    judgement = judge(subject)
    lines = judgement.lines()
    for line in lines:
        print(line)
    left = repository.uncommitted(EVIDENCE, SITE) if arguments.head == "HEAD" else []
    if left:
        print(f"Note: not committed and not judged: {', '.join(left[:10])}{' ...' if len(left) > 10 else ''}")
    if arguments.summary is not None:
        try:
            text = "\n".join(["### Submission check", "", *(f"- `{line.replace('`', chr(39))}`" for line in lines)])
            arguments.summary.write_text(text + "\n", encoding="utf-8")
        except OSError as problem:
            raise ConfigError(f"--summary {arguments.summary}: cannot be written: {problem.strerror}.") from None
    return judgement.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="check_submission", description=__doc__, allow_abbrev=False)
    parser.add_argument("--base", metavar="REF", help="branch to merge into (default: origin/main, else main)")
    parser.add_argument("--head", default="HEAD", metavar="REF", help="commit to judge (default: HEAD)")
    parser.add_argument("--repository", type=Path, default=Path(), metavar="DIR", help="clone (default: this folder)")
    parser.add_argument(
        "--division", choices=("formal", "demo"), default="formal", help="demo judges evidence/demo by the same rules"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="also write the result as Markdown")
    return parser


if __name__ == "__main__":
    run_command(main)
