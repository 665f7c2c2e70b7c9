"""Two pretend machines of this host under Accelerate: the documented command, and what is refused at once."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed import free_port
from tests.launch.scripts import LAUNCH, ROOT, environment
from tests.training.trainer_runs import events, metrics

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.dist
# Word for word the command of the quick start; only the trainer's arguments are other ones.
ACCELERATE = """
export FLA_DISABLE_BACKEND_DISPATCH=1
accelerate launch --config_file launch/accelerate.yaml \\
  --num_machines "$NNODES" --num_processes "$((NNODES * GPUS_PER_NODE))" \\
  --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" \\
  --module nexttransformer.train """
NODE = f"{LAUNCH / 'node.sh'} "
TRAINER = "--config configs/baseline/dense_full.json --site-config {site} --output {output} --micro-batch 4 "
TRAINER += "--protocol test-v1 --updates 2 --eval none"
LIMIT_SECONDS = 200


def job(num_nodes: int, per_node: int, rank: int, port: int) -> dict[str, str]:
    values = {"NNODES": num_nodes, "GPUS_PER_NODE": per_node, "NODE_RANK": rank, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in values.items()}}


def run_nodes(command: str, *nodes: dict[str, str]) -> list[tuple[int, str, str]]:
    """Runs a command once with each node's variables, all at once; returns exit code, stdout and stderr of each."""
    processes = []
    for variables in nodes:
        base = environment(GLOO_SOCKET_IFNAME="lo", **variables)
        base["PATH"] = f"{sys.prefix}/bin:{base['PATH']}"
        words = ["bash", "-c", command]
        processes.append(
            subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=base)
        )
    found = []
    for process in processes:
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
        found.append((process.returncode, output, errors))
    return found


def refusal_lines(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.strip()]


def test_two_machines_with_the_documented_command(prepared_site: Path, tmp_path: Path) -> None:
    command = ACCELERATE + TRAINER.format(site=prepared_site, output=tmp_path / "run")
    port = free_port()
    first, second = run_nodes(command, *(job(2, 1, rank, port) for rank in (0, 1)))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "nodes       2, world size 2, device cpu" in first[1]
    assert first[1].rstrip().endswith("finished at update 2 (checkpoint_00000002).")
    # Only rank 0 speaks.
    assert "update" not in second[1]
    (start,) = events(tmp_path / "run", "attempt_start")
    assert (start["meta"]["num_nodes"], start["meta"]["rank_rows"]) == (2, [4, 4])
    assert [(line["rows"], line["tokens"]) for line in metrics(tmp_path / "run")] == [(8, 1024)] * 2


def test_seven_processes_over_two_machines(prepared_site: Path, tmp_path: Path) -> None:
    # Numbers written into the command, and a node rank under a name of the platform's own.
    command = ACCELERATE.replace('"$((NNODES * GPUS_PER_NODE))"', "7").replace('"$NNODES"', "2")
    command = command.replace("$NODE_RANK", "$MY_RANK") + TRAINER.format(site=prepared_site, output=tmp_path / "run")
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for code, _, errors in run_nodes(command, *({"MY_RANK": rank, **common} for rank in "01")):
        assert code == 1
        (line,) = [line for line in errors.splitlines() if line.startswith("--num_processes 7")]
        assert line.startswith("--num_processes 7 over --num_machines 2: Accelerate started only 6 processes.")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"GPUS_PER_NODE": ""}, "GPUS_PER_NODE not set although NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT set"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2 contradicts NNODES=2: expected 0 to NNODES - 1."),
        ({"MASTER_PORT": "80"}, "MASTER_PORT=80: expected a port from 1024 to 65535."),
        ({"NNODES": "two"}, "NNODES=two: expected a whole number"),
        ({"RANK": "0"}, "RANK=0 is set: another launcher started this process."),
        ({"SLURM_GPUS_ON_NODE": "8"}, "GPUS_PER_NODE=1 contradicts SLURM_GPUS_ON_NODE=8."),
    ],
)
def test_bad_variables_are_one_line(change: dict[str, str], expected: str, prepared_site: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    command = NODE + TRAINER.format(site=prepared_site, output=tmp_path / "run")
    ((code, _, errors),) = run_nodes(command, {**job(2, 1, 0, free_port()), **change})
    assert code == 2
    (line,) = refusal_lines(errors)
    assert line.startswith(expected)
    # Far below any limit for other nodes: nobody was waited for.
    assert time.monotonic() - started < 60


def test_a_doubled_node_rank_and_unequal_nodes_are_one_line(prepared_site: Path, tmp_path: Path) -> None:
    command = NODE + TRAINER.format(site=prepared_site, output=tmp_path / "run")
    port = free_port()
    for code, _, errors in run_nodes(command, job(2, 1, 0, port), job(2, 2, 1, port)):
        assert code == 2
        (line,) = refusal_lines(errors)
        assert line.startswith("GPUS_PER_NODE differs between nodes: 1 on ")
    port = free_port()
    for code, _, errors in run_nodes(command, *(job(3, 1, rank, port) for rank in (0, 1, 1))):
        assert code == 2
        (line,) = refusal_lines(errors)
        assert line.startswith("NODE_RANK=1 is used on ") and line.endswith("Give every node its own rank from 0.")
    assert not (tmp_path / "run").exists()


def test_settings_are_native_ddp_on_two_machines_of_eight() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    settings = vars(load_config_from_file(str(LAUNCH / "accelerate.yaml")))
    assert settings["distributed_type"] == "MULTI_GPU"
    assert (settings["num_machines"], settings["num_processes"], settings["machine_rank"]) == (2, 16, 0)
    assert (settings["mixed_precision"], settings["rdzv_backend"], settings["same_network"]) == ("no", "static", True)
    assert not settings["deepspeed_config"] and not settings["fsdp_config"] and not settings["dynamo_config"]
