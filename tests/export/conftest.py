import os
from pathlib import Path

import pytest

from tests.export.exported import ExportedRun, finished, make_export
from tests.finished_run import freeze_package


@pytest.fixture(scope="session")
def exported(prepared_site: Path) -> ExportedRun:
    """The session's run, audited and exported as if the package's files were still those of the run."""
    run, files = finished(prepared_site)
    with pytest.MonkeyPatch.context() as patch:
        freeze_package(files, patch)
        return make_export(prepared_site, run)


@pytest.fixture(scope="session", autouse=True)
def transformers_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the copies of modeling files out of the user's home and Transformers off the network."""
    os.environ.setdefault("HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
