"""Shared by all tests: one thread per process, and tiny prepared data made once for the whole session."""

import fcntl
import json
import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is slow, not wrong.
settings.register_profile("nexttransformer", deadline=None)
settings.load_profile("nexttransformer")

# Before anything imports torch. Two test processes on two cores want one thread each.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def prepared_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a site file whose data root holds prepared `test-v1` data. Read-only for tests."""
    from nexttransformer import prepare_data

    folder = tmp_path_factory.getbasetemp()
    # Workers of one parallel session have sibling folders and share the data.
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "prepared_site"
    folder.mkdir(exist_ok=True)
    site = folder / "site.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not site.exists():
            partial = folder / "partial.json"
            partial.write_text(json.dumps({"data_root": "data", "cache_root": "cache", "scratch_root": "scratch"}))
            arguments = ["--protocol", "test-v1", "--site-config", str(partial), "--workers", "1"]
            assert prepare_data.main(arguments) == 0
            partial.rename(site)
    return site


@pytest.fixture(scope="session")
def prepared_data(prepared_site: Path) -> Path:
    """Returns the folder of prepared `test-v1` data. Read-only for tests."""
    return prepared_site.parent / "data/test-v1"
