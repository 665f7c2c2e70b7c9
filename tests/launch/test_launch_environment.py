import pytest

from nexttransformer.launch_environment import JOB_VARIABLES, job_problems, local_problems

JOB = {"NNODES": "2", "GPUS_PER_NODE": "8", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environ",
    [{}, {"NNODES": "1"}, {**JOB, "NNODES": "1", "NODE_RANK": "0"}, {"NPROC_PER_NODE": "2", "GPUS_PER_NODE": "2"}],
)
def test_one_machine_is_fine(environ: dict[str, str]) -> None:
    assert local_problems(environ) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"NNODES": "2"}, ["launch/train.sh starts one machine only. Use: accelerate launch"]),
        (JOB, ["launch/train.sh starts one machine only. Use: accelerate launch"]),
        ({"NODE_RANK": "0", "MASTER_ADDR": "node0"}, ["NODE_RANK, MASTER_ADDR set without NNODES"]),
        ({"NNODES": "1", "NODE_RANK": "3"}, ["NODE_RANK=3 contradicts NNODES=1"]),
        ({"RANK": "0", "WORLD_SIZE": "8"}, ["RANK=0 is set", "WORLD_SIZE=8 is set"]),
        ({"NPROC_PER_NODE": "0"}, ["NPROC_PER_NODE=0: expected a whole number of at least 1"]),
        ({"NPROC_PER_NODE": "4", "GPUS_PER_NODE": "8"}, ["NPROC_PER_NODE=4 contradicts GPUS_PER_NODE=8"]),
        ({"NNODES": "two", "NPROC_PER_NODE": "-1"}, ["NNODES=two: expected", "NPROC_PER_NODE=-1: expected"]),
        ({"NNODES": "1", "MASTER_PORT": "80"}, ["MASTER_PORT=80: expected a port from 1024 to 65535"]),
        ({"NNODES": "1", "MASTER_PORT": "65536"}, ["MASTER_PORT=65536: expected a port from 1024 to 65535"]),
    ],
)
def test_one_line_for_each_problem(environ: dict[str, str], expected: list[str]) -> None:
    problems = local_problems(environ)
    assert len(problems) == len(expected)
    for problem, text in zip(problems, expected, strict=True):
        assert text in problem and "\n" not in problem


def test_a_whole_job_is_fine_and_half_of_one_is_not() -> None:
    assert job_problems(JOB) == job_problems({}) == []
    for name in JOB_VARIABLES:
        half = {key: value for key, value in JOB.items() if key != name}
        assert [f"{name} not set" in problem for problem in job_problems(half)] == [True]
    assert "NODE_RANK=2 contradicts NNODES=2" in job_problems({**JOB, "NODE_RANK": "2"})[0]
    assert len(job_problems({**JOB, "NNODES": "x", "MASTER_PORT": "99999"})) == 2
