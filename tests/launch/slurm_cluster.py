"""A real Slurm on this machine: munged, slurmctld and one slurmd per pretend node, in a temporary folder.

Everything listens on loopback with ports of its own and stops with the fixture; a Slurm installed on the
machine is not touched. Nodes have more CPUs than the machine and eight GPUs that are plain files, which
Slurm only counts.
"""

import grp
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.launch.scripts import environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
CPUS_PER_NODE = 16
GPUS_PER_NODE = 8
_START_SECONDS = 60.0

_CONFIGURATION = """\
ClusterName=pretend
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={controller_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
CompleteWait=0
MinJobAge=300
MessageTimeout=30
SlurmctldTimeout=60
SlurmdTimeout=120
UnkillableStepTimeout=60
GresTypes=gpu
"""


class NoSlurm(Exception):
    """Slurm cannot start here; the text says why."""


@dataclass
class SlurmCluster:
    """A running cluster. `stop` ends exactly the daemons started here."""

    folder: Path
    num_nodes: int
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user at the login node, with this Python as the installed one."""
        return environment(SLURM_CONF=str(self.folder / "slurm.conf"), HOME=str(self.folder))

    def run(self, *words: str | Path, cwd: Path | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
        """Runs a Slurm command with this cluster's configuration."""
        command = [str(word) for word in words]
        variables = {**self.environment, **extra}
        return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables, timeout=60)

    def submit(self, *words: str | Path, cwd: Path, **extra: str) -> str:
        """Submits a batch file and returns the job's id."""
        result = self.run("sbatch", "--parsable", *words, cwd=cwd, **extra)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """Returns what scontrol says about a job."""
        text = self.run("scontrol", "show", "job", job_id, "--oneliner").stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, job_id: str, seconds: float = 150.0) -> dict[str, str]:
        """Waits until a job has ended for good and returns what scontrol says about it."""
        alive = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED", "SIGNALING")
        self.until(lambda: self.job(job_id).get("JobState", "PENDING") not in alive, seconds, f"job {job_id} ended")
        return self.job(job_id)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits for a condition; on timeout fails with the ends of the cluster's logs."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(f"{path.name}:\n{path.read_text()[-600:]}" for path in self.folder.glob("*.log"))
                raise AssertionError(f"not within {seconds:.0f} s: {what}\n{logs}")
            time.sleep(0.3)

    def task_processes(self, job_id: str, node: int) -> list[int]:
        """Returns the process ids of a job's step 0 on a node (not of the batch shell)."""
        wanted = {f"SLURM_JOB_ID={job_id}", f"SLURMD_NODENAME=n{node}", "SLURM_STEP_ID=0"}
        wanted.add(f"SLURM_CONF={self.folder}/slurm.conf")
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = set(file.read_bytes().decode(errors="replace").split("\0"))
            except OSError:
                # Ended in between.
                continue
            if wanted <= variables:
                found.append(int(file.parent.name))
        return sorted(found)

    def stop(self) -> None:
        """Ends all jobs, then the daemons."""
        if len(self._daemons) > 1:
            try:
                self.run("scancel", "--signal=KILL", "--user", pwd.getpwuid(os.getuid()).pw_name)
                self.run("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
                self.until(lambda: not self.run("squeue", "--noheader").stdout.strip(), 20, "all jobs ended")
            except (AssertionError, subprocess.TimeoutExpired) as error:
                print(f"jobs may be left: {error}", file=sys.stderr)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()


def start_cluster(folder: Path, num_nodes: int = 2) -> SlurmCluster:
    """Starts a cluster with nodes n0, n1, ... in a folder.

    Raises:
        NoSlurm: if programs are missing or the daemons do not come up.
    """
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        raise NoSlurm(f"not installed: {', '.join(missing)} (Debian packages slurm-wlm and munge)")
    # munged wants a folder that nobody else can write, and a short path for its socket.
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    _write_configuration(folder, num_nodes)
    cluster = SlurmCluster(folder, num_nodes)
    try:
        _start_daemons(cluster)
    except NoSlurm:
        cluster.stop()
        raise
    return cluster


def _program(name: str) -> str | None:
    return shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin")


def _write_configuration(folder: Path, num_nodes: int) -> None:
    (folder / "state").mkdir(exist_ok=True)
    user = pwd.getpwuid(os.getuid()).pw_name
    ports = _free_ports(num_nodes + 1)
    text = _CONFIGURATION.format(host=socket.gethostname(), user=user, folder=folder, controller_port=ports[0])
    devices = folder / "devices"
    devices.mkdir(exist_ok=True)
    for index in range(GPUS_PER_NODE):
        (devices / f"gpu{index}").touch()
    for node in range(num_nodes):
        (folder / f"spool-n{node}").mkdir(exist_ok=True)
        text += (
            f"NodeName=n{node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[node + 1]} "
            f"CPUs={CPUS_PER_NODE} RealMemory=8000 Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN\n"
        )
    text += f"PartitionName=all Nodes=n[0-{num_nodes - 1}] Default=YES MaxTime=INFINITE State=UP\n"
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text(f"Name=gpu File={devices}/gpu[0-{GPUS_PER_NODE - 1}]\n")
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o400)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _start_daemons(cluster: SlurmCluster) -> None:
    folder = cluster.folder
    group = grp.getgrgid(os.getgid()).gr_name
    assert group
    _start(
        cluster,
        *("munged", "--foreground", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket"),
        *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        "--force",
    )
    _await(cluster, lambda: (folder / "munge.socket").exists(), "munged")
    _start(cluster, "slurmctld", "-D", "-c", "-f", f"{folder}/slurm.conf")
    for node in range(cluster.num_nodes):
        _start(cluster, "slurmd", "-D", "-c", "-N", f"n{node}", "-f", f"{folder}/slurm.conf")

    def nodes_are_idle() -> bool:
        states = cluster.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()
        return len(states) == cluster.num_nodes and set(states) == {"idle"}

    _await(cluster, nodes_are_idle, "idle nodes")


def _start(cluster: SlurmCluster, program: str, *arguments: str) -> None:
    path = _program(program)
    assert path is not None
    with (cluster.folder / f"{program}.out.log").open("ab") as log:
        command = [path, *arguments]
        daemon = subprocess.Popen(command, stdout=log, stderr=log, env=cluster.environment, start_new_session=True)
    cluster._daemons.append(daemon)


def _await(cluster: SlurmCluster, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        ended = [daemon.args for daemon in cluster._daemons if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            logs = " ".join(path.read_text()[-400:] for path in sorted(cluster.folder.glob("*.log")))
            why = f"{ended} ended" if ended else f"no {what} within {_START_SECONDS:.0f} s"
            raise NoSlurm(f"{why}: {' '.join(logs.split())[-800:]}")
        time.sleep(0.2)
