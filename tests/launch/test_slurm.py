"""The shipped batch file under a real Slurm, submitted unmodified: only sbatch options and trainer arguments are given.

Pretend nodes n0 to n3 of this machine, gloo on the CPU, tiny protocol. GPUs are counted by Slurm only.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.scripts import ROOT
from tests.launch.slurm_cluster import NoSlurm, SlurmCluster, start_cluster
from tests.training.trainer_runs import arguments, checkpoint_tensors, events, fraction_beyond, metrics, state, train

# Starting a job imports torch four times one after the other, which a busy machine takes a minute for.
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
BATCH = "launch/slurm.sbatch"
SECONDS = 300.0
# A folder whose sitecustomize.py holds a trainer at an update.
GATE = ROOT / "tests/launch/gate"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    try:
        started = start_cluster(tmp_path_factory.mktemp("slurm"), num_nodes=4)
    except NoSlurm as reason:
        pytest.skip(f"Slurm cannot start here: {reason}")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def checkout(prepared_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a login node has: edits of the real one must not reach running jobs."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("launch", "configs", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    site = {"data_root": str(prepared_site.parent / "data"), "cache_root": "cache", "scratch_root": "scratch"}
    (folder / "site.local.json").write_text(json.dumps(site))
    return folder


class Login:
    """A login node: submits from the checkout and reads what jobs print."""

    def __init__(self, cluster: SlurmCluster, checkout: Path) -> None:
        self.cluster, self.checkout = cluster, checkout

    def submit(self, options: str, trainer: str, cwd: Path | None = None, **variables: str) -> str:
        path = f"{self.checkout / 'src'}:{GATE}"
        variables = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", **variables}
        return self.cluster.submit(
            *options.split(), self.checkout / BATCH, *trainer.split(), cwd=cwd or self.checkout, **variables
        )

    def output(self, job: str, folder: Path | None = None) -> list[str]:
        """Returns the lines a job has printed, over all of its starts."""
        path = (folder or self.checkout) / f"slurm-{job}.out"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(scope="module")
def login(cluster: SlurmCluster, checkout: Path) -> Login:
    return Login(cluster, checkout)


@pytest.mark.parametrize(
    ("options", "trainer", "nodes", "cpus"),
    [
        ("", "", "n[0-1]", 32),
        (
            "--nodes=4",
            "--config configs/hybrid/gdn_hybrid.json --site-config site.local.json --output runs/gdn-hybrid "
            "--micro-batch 8 --formal",
            "n[0-3]",
            64,
        ),
    ],
)
def test_slurm_would_accept_the_documented_submissions(
    login: Login, options: str, trainer: str, nodes: str, cpus: int
) -> None:
    words = [*options.split(), BATCH, *trainer.split()]
    result = login.cluster.run("sbatch", "--test-only", *words, cwd=login.checkout)
    assert result.returncode == 0, result.stderr
    assert f"using {cpus} processors on nodes {nodes}" in result.stderr


def test_ranks_address_and_metrics_of_two_nodes_with_two_processes_each(login: Login) -> None:
    job = login.submit(
        "--gpus-per-node=2",
        "--config configs/baseline/dense_full.json --output runs/four --protocol test-v1 --micro-batch 2 "
        "--updates 2 --eval none",
    )
    ended = login.cluster.wait(job, SECONDS)
    lines, run = login.output(job), login.checkout / "runs/four"
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), lines
    assert lines[-1] == "slurm: runs/four: finished at update 2 (checkpoint_00000002)."
    port = 15000 + int(job)
    assert [line for line in lines if "address" in line] == [
        f"slurm: job {job}, start 1, 2 nodes (n[0-1]), address 127.0.0.1:{port}"
    ]
    launched = sorted(line for line in lines if line.startswith("launch: node"))
    assert len(launched) == 2
    for node, line in enumerate(launched):
        assert line.startswith(f"launch: node {node}: accelerate launch --config_file ")
        assert "--num_machines 2 --num_processes 4 " in line and f"--machine_rank {node} " in line
        assert f"--main_process_ip 127.0.0.1 --main_process_port {port} " in line
    assert any(line.startswith("nodes       2, world size 4, device cpu") for line in lines)
    (start,) = events(run, "attempt_start")
    assert (start["meta"]["world_size"], start["meta"]["num_nodes"]) == (4, 2)
    assert start["meta"]["rank_rows"] == [2, 2, 2, 2]
    assert [(line["update"], line["rows"], line["tokens"]) for line in metrics(run)] == [(1, 8, 1024), (2, 8, 1024)]
    assert not (run / "stop_requested").exists() and not (run / "train.lock").exists()


def command_line(process: int) -> bytes:
    """Returns the arguments of a process, each ended by a zero byte; nothing if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def test_limit_kill_warning_and_other_numbers_of_nodes(login: Login, prepared_site: Path, tmp_path: Path) -> None:
    run, straight = login.checkout / "runs/changing", tmp_path / "straight"
    # Both begin with the same checkpoint of update 1, made from output projections that are not zero: from the
    # protocol's own zeros rounding decides the first steps (a W_o of 1e-12 has a direction).
    faults = [("initialized", 0, 0, "fill"), ("nats", 0, 0, f"touch {straight / 'stop_requested'}")]
    words = arguments(prepared_site, straight)
    assert train(words, faults=faults) == [(0, "")]
    assert state(straight)["update"] == 1
    shutil.copytree(straight, run)
    assert train(words) == [(0, "")]

    trainer = "--config configs/baseline/dense_full.json --output runs/changing --protocol test-v1 --micro-batch 1"
    trainer += " --eval none"
    gate = tmp_path / "gate"
    held = gate.with_suffix(".held")

    def let_on_to(update: int) -> None:
        held.unlink(missing_ok=True)
        gate.with_suffix(".new").write_text(str(update))
        gate.with_suffix(".new").replace(gate)

    def until_held(update: int) -> None:
        login.cluster.until(lambda: held.exists() and held.read_text() == str(update), SECONDS, f"held at {update}")

    def until_warned() -> None:
        login.cluster.until(lambda: any("got SIGUSR1" in line for line in login.output(job)), SECONDS, "a warning")
        # A starting attempt removes an old one; this one has started, and the next look of the batch shell writes it.
        login.cluster.until((run / "stop_requested").exists, SECONDS, "a stop file")

    # 1. Two nodes. The time limit is so near that the warning comes at once, though Slurm looks at limits only every
    # half minute; until it has come the trainer is held.
    let_on_to(1)
    job = login.submit("--gpus-per-node=1 --time=3 --signal=B:USR1@180", trainer, TEST_GATE=str(gate))
    until_held(1)
    until_warned()
    let_on_to(2)
    login.cluster.until(lambda: login.cluster.job(job)["Restarts"] == "1", SECONDS, "queued again after the warning")
    login.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert state(run)["update"] == 2
    assert "stopped and saved at update 2 (checkpoint_00000002). Slurm is asked to queue the job again" in "\n".join(
        login.output(job)
    )
    # 2. Still two nodes, the same job; then the trainer of n1's task is killed.
    let_on_to(8)
    until_held(8)
    on_n1 = login.cluster.task_processes(job, node=1)
    (trained,) = [each for each in on_n1 if b"nexttransformer.train\0" in command_line(each)]
    os.kill(trained, signal.SIGKILL)
    login.cluster.until(lambda: login.cluster.job(job)["Restarts"] == "2", SECONDS, "queued again after the kill")
    lines = login.output(job)
    assert any("rank 1 of 2 on" in line and line.endswith("ended by SIGKILL.") for line in lines)
    assert "the processes vanished after update 5; newest complete checkpoint: checkpoint_00000005" in "\n".join(lines)
    login.cluster.run("scancel", job)
    login.cluster.wait(job, SECONDS)
    # 3. One node without GPUs, and a job that may not be queued again: warned, it saves and says so.
    before = state(run)["update"]
    let_on_to(before + 1)
    options = "--nodes=1 --gpus-per-node=0 --no-requeue"
    job = login.submit(options, trainer, GPUS_PER_NODE="1", TEST_GATE=str(gate))
    until_held(before + 1)
    assert login.cluster.run("scancel", "--batch", "--signal=USR1", job).returncode == 0
    until_warned()
    let_on_to(before + 2)
    ended = login.cluster.wait(job, SECONDS)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    assert login.output(job)[-1].endswith("Submit the same command to continue.")
    assert (state(run)["status"], state(run)["update"]) == ("stopped", before + 2)
    # 4. Two nodes again, to the end.
    job = login.submit("--gpus-per-node=1", trainer)
    assert login.cluster.wait(job, SECONDS)["JobState"] == "COMPLETED"
    assert login.output(job)[-1] == "slurm: runs/changing: finished at update 20 (checkpoint_00000020)."

    starts = events(run, "attempt_start")
    sizes = [start["meta"]["world_size"] for start in starts]
    assert sizes == [1, 2, 2, 1, 2]
    keys = ("update", "rows", "tokens", "rows_hash", "data_chain", "learning_rates")
    found, expected = ([[line[key] for key in keys] for line in metrics(folder)] for folder in (run, straight))
    assert found == expected and len(found) == 20
    tensors, wanted = (checkpoint_tensors(folder / "checkpoint_00000020") for folder in (run, straight))
    beyond = fraction_beyond(tensors, wanted, 1e-4)
    print(f"world sizes {sizes}; largest fraction of a tensor's elements that differ by more than 1e-4: {beyond:.1e}")
    assert beyond < 1e-3


def test_refusals_are_the_last_line_and_not_queued_again(login: Login, tmp_path: Path) -> None:
    trainer = "--config configs/linear/gdn.json --output runs/refused --protocol test-v1 --micro-batch {}"
    elsewhere = login.submit("--nodes=1", trainer.format(1), cwd=tmp_path)
    mistaken = login.submit("--nodes=1", trainer.format(0))
    no_gpus = login.submit("--nodes=1 --gpus-per-node=0", trainer.format(1))
    contradicting = login.submit("--nodes=1 --gpus-per-node=4", trainer.format(1), GPUS_PER_NODE="2")
    for job in (elsewhere, mistaken, no_gpus, contradicting):
        ended = login.cluster.wait(job, SECONDS)
        assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "2:0", "0")
    (line,) = login.output(elsewhere, tmp_path)
    assert line.endswith("holds no launch/env.sh. Submit from the root of the repository.")
    mistake, last = login.output(mistaken)
    assert mistake.startswith("--micro-batch 0: expected a whole number")
    assert last == "slurm: refused: no attempt was started (lines above)."
    assert any(line.startswith("GPUS_PER_NODE not set although") for line in login.output(no_gpus))
    assert any(
        line.startswith("GPUS_PER_NODE=2 contradicts SLURM_GPUS_ON_NODE=4.") for line in login.output(contradicting)
    )
    for job in (no_gpus, contradicting):
        assert login.output(job)[-1].endswith("the attempt never began. Correct what is said above.")
