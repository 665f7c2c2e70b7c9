"""Uploading an exported folder to a repository of the Hugging Face Hub."""

import os
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from nexttransformer.errors import AuditError, ConfigError
from nexttransformer.export.record import DEMO_MARK, Record


def check_repository(repo: str) -> None:
    """Refuses a name that no repository can have.

    Raises:
        ConfigError: naming it.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError:
        is_valid = False
    else:
        is_valid = repo.count("/") == 1
    if not is_valid:
        raise ConfigError(f"--push {repo}: expected OWNER/NAME of letters, digits and . _ -, at most 96 characters.")


def push_folder(folder: Path, repo: str, record: Record) -> str:
    """Creates the repository where it is missing, uploads the folder as one commit and returns its address.

    The account is that of `hf auth login` or HF_TOKEN. Files that the repository already has are not sent again.

    Raises:
        AuditError: refused or unreachable; the export itself is complete.
    """
    mark = f"{DEMO_MARK} " if record.division == "demo" else ""
    message = f"{mark}{record.method}, {record.protocol.id}, run {record.run_id}"
    # Read here and not at import: a test, or a mirror, may set it late.
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        api.create_repo(repo, repo_type="model", exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, repo_type="model", commit_message=message)
    except LocalTokenNotFoundError:
        raise AuditError(f"--push {repo}: not signed in. Run 'hf auth login' or set HF_TOKEN, then repeat.") from None
    except Exception as problem:  # noqa: BLE001 - the client's transport, and so what it raises, differs by release
        reason = " ".join(str(problem).split())[:300]
        raise AuditError(
            f"--push {repo}: {type(problem).__name__}: {reason} The export in {folder} is complete; repeat the command."
        ) from None
    return f"{api.endpoint}/{repo}"
