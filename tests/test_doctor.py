import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from nexttransformer import diagnostics, doctor, kernel_report
from nexttransformer.errors import ConfigError, DataError, ProtocolError
from nexttransformer.ops import backends, fla_core
from nexttransformer.protocol import TEST_V1
from tests.ops.fla_stub import FlaStub

AFFECTED = backends.Versions("2.11.0", "13.0", "580.95", "3.6.0", "0.6.0")


@pytest.fixture
def site_file(tmp_path, monkeypatch):
    for name in ("NEXTTRANSFORMER_SITE_CONFIG", "MASTER_ADDR", "NNODES", "NODE_RANK", "MASTER_PORT", "GPUS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "site.json"
    file.write_text(json.dumps({"data_root": "data", "cache_root": "cache", "scratch_root": "scratch"}))
    return file


def statuses(findings):
    return [finding.status for finding in findings]


def test_nothing_prepared_is_no_failure(site_file, capsys):
    assert doctor.main(["--site-config", str(site_file)]) == 0
    output = capsys.readouterr().out
    assert (
        "nothing prepared" in output and "prepare_data --protocol demo-v1" in output and "No problem found." in output
    )


def test_a_protocol_that_is_asked_for_must_be_ready(site_file, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert doctor.main(["--site-config", str(site_file), "--protocol", "formal-v1", "--json", str(report)]) == 1
    output = capsys.readouterr().out
    assert "prepare_data --protocol formal-v1" in output and "core_bundle" in output
    record = json.loads(report.read_text())
    failed = {finding["area"] for finding in record["findings"] if finding["status"] == "fail"}
    assert failed == {"data", "CORE"}
    assert all(finding["action"] for finding in record["findings"] if finding["status"] == "fail")


def test_missing_site_file(site_file, tmp_path, capsys):
    assert doctor.main([]) == 0
    assert doctor.main(["--site-config", str(tmp_path / "absent.json")]) == 1
    assert "absent.json" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--json .*: cannot be written: No such file or directory"):
        doctor.main(["--site-config", str(tmp_path / "absent.json"), "--json", str(tmp_path / "no/report.json")])


def test_wrong_options(site_file):
    with pytest.raises(ProtocolError, match="formal-v1"):
        doctor.main(["--protocol", "formal"])
    with pytest.raises(ConfigError, match="--head-dim 32"):
        doctor.main(["--head-dim", "32"])


def test_prepared_data(site_file, monkeypatch):
    site, _ = diagnostics.site(site_file)
    assert site is not None
    folder = site.data_folder("test-v1")
    (folder / "train").mkdir(parents=True)
    files = [SimpleNamespace(name="rows_0.bin"), SimpleNamespace(name="rows_1.bin")]
    manifest = SimpleNamespace(splits={"train": SimpleNamespace(rows=160, files=files)})
    monkeypatch.setattr(diagnostics, "load_manifest", lambda path: manifest)
    monkeypatch.setattr(diagnostics, "check_protocol", lambda manifest, protocol, folder: None)
    (folder / "train" / "rows_0.bin").touch()
    (finding,) = diagnostics.data(site, "test-v1")
    assert finding.status == "fail" and "1 row files missing, first rows_1.bin" in finding.text
    (folder / "train" / "rows_1.bin").touch()
    assert statuses(diagnostics.data(site, "test-v1")) == ["ok"]

    def damaged(path):
        raise DataError("manifest.json: digest differs")

    monkeypatch.setattr(diagnostics, "load_manifest", damaged)
    assert diagnostics.data(site, None)[0].status == "fail"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["ok", "ok"]),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, ["ok", "ok"]),
        ({"MASTER_ADDR": "127.0.0.1"}, ["fail", "ok", "ok"]),
        (
            {
                "NNODES": "2",
                "GPUS_PER_NODE": "8",
                "NODE_RANK": "0",
                "MASTER_ADDR": "no-such-host.invalid",
                "MASTER_PORT": "29500",
            },
            ["ok", "fail"],
        ),
    ],
)
def test_network(environ, expected):
    assert statuses(diagnostics.network(environ)) == expected


def test_cpu_torch_on_a_gpu_machine(monkeypatch):
    monkeypatch.setattr(backends, "driver_version", lambda: "580.95")
    monkeypatch.setattr(torch.version, "cuda", None)
    (finding,) = [found for found in diagnostics.environment() if found.status == "fail"]
    assert "CPU-only" in finding.text and "launch/install.sh --gpu" in finding.action


def test_low_disk_is_a_note(site_file, monkeypatch):
    site, _ = diagnostics.site(site_file)
    monkeypatch.setattr(diagnostics.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    findings = diagnostics.disk(site)
    assert len(findings) == 4 and set(statuses(findings)) == {"note"}


def test_kernel_versions(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends, "is_hopper", lambda device=None: True)
    monkeypatch.setattr(backends, "installed", lambda name: "1.0")
    monkeypatch.setenv(backends.DISPATCH_VARIABLE, "1")
    monkeypatch.setattr(backends, "versions", lambda: AFFECTED)
    first, second = kernel_report.kernel_versions()
    assert (first.status, second.status) == ("ok", "note") and "chunk_gated_delta_rule" in second.text
    monkeypatch.setattr(backends, "versions", lambda: replace(AFFECTED, fla_core=None))
    assert statuses(kernel_report.kernel_versions()) == ["fail"]


def test_kernel_table(monkeypatch, capsys):
    stub = FlaStub()
    stub.install(monkeypatch)
    stub.chunk_o.TRITON_ABOVE_3_7_1 = False
    stub.damage["gdn"] = 1.1
    monkeypatch.setattr(backends, "missing_package", lambda found: None)
    monkeypatch.setattr(backends, "is_hopper", lambda device=None: True)
    monkeypatch.setattr(backends, "versions", lambda: AFFECTED)
    checks, findings = kernel_report.check_all_kernels(
        Console(width=200),
        ["gated_delta_rule", "attention"],
        head_dim=32,
        device=torch.device("cpu"),
        protocol=TEST_V1,
    )
    output = capsys.readouterr().out
    assert [(check.op, check.path, check.passed) for check in checks] == [
        ("gated_delta_rule", "fla", False),
        ("gated_delta_rule", "kda_broadcast", True),
        ("attention", "native", True),
        ("attention", "native", True),
    ]
    assert [check.guard for check in checks] == ["bypassed", "none", "none", "none"]
    assert statuses(findings) == ["fail"] and "dk 0.1" in findings[0].text
    assert "strong_decay" in output and "(0.01)" in output
    assert not fla_core.is_guard_bypassed()


def test_help_names_every_protocol(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    assert "demo-v1" in capsys.readouterr().out
