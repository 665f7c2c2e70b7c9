"""Nodes that meet over real sockets of this machine, each in a thread."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from nexttransformer.errors import NodeError
from nexttransformer.node_roll_call import NodeRecord, meet, own_record, record_problems
from tests.distributed import free_port

ARGUMENTS = ["--config", "x.json"]


def answers(*records: NodeRecord, port: int = 0, limit_seconds: float = 10.0) -> list[str | None]:
    """Lets nodes meet at once; returns each one's refusal, None where all is well."""
    port = port or free_port()

    def one(record: NodeRecord) -> str | None:
        try:
            meet(record, "127.0.0.1", port, limit_seconds=limit_seconds)
        except NodeError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(records)) as pool:
        return list(pool.map(one, records))


def node(rank: int, num_nodes: int = 3, per_node: int = 8, host: str = "", arguments: list[str] = ARGUMENTS):
    record = own_record(rank, num_nodes, per_node, arguments)
    return NodeRecord(**{**record.__dict__, "host": host or f"host{rank}"})


def test_all_meet_and_the_port_is_free_again() -> None:
    port = free_port()
    for _ in range(2):
        assert answers(node(0), node(1), node(2), port=port) == [None] * 3
        # Without SO_REUSEADDR: nobody left the port in a waiting state.
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))
    assert answers(node(0, num_nodes=1)) == [None]


def test_a_doubled_rank_names_both_hosts_to_all() -> None:
    found = answers(node(0), node(1), node(1, host="other"))
    assert len(set(found)) == 1 and found[0] is not None
    assert found[0].startswith("NODE_RANK=1 is used on ") and "host1" in found[0] and "other" in found[0]
    assert "\n" not in found[0]


def test_two_nodes_zero() -> None:
    # On one host the second finds the port taken; on another it knocks at the common address.
    first, second = sorted(answers(node(0, 2), node(0, 2), limit_seconds=1.0), key=str)
    assert first is not None and second is not None
    assert first.startswith("1 of 2 nodes did not come") and "node 1." in first
    assert second.startswith("MASTER_PORT=") and "another node 0 uses it" in second
    (line,) = record_problems([node(0, 2, host="a"), node(0, 2, host="b")])
    assert line == "NODE_RANK=0 is used on a and on b. Give every node its own rank from 0."


def test_missing_nodes_are_named_on_both_sides() -> None:
    (head,) = answers(node(0), limit_seconds=0.5)
    assert head is not None and "2 of 3 nodes did not come" in head and "node 1, 2." in head
    (other,) = answers(node(1), limit_seconds=0.5)
    assert other is not None and other.startswith("Node 0 did not answer at MASTER_ADDR=127.0.0.1")
    assert "said by node 1 on host1" in other


def test_differences_are_named() -> None:
    found = answers(node(0, 2), node(1, 2, per_node=4, arguments=["--config", "y.json"]))
    assert found[0] == found[1] and found[0] is not None
    lines = found[0].splitlines()
    assert lines[0].startswith("GPUS_PER_NODE differs between nodes: 8 on host0 (node 0), 4 on host1 (node 1).")
    assert "--config x.json on host0" in lines[1] and "--config y.json on host1" in lines[1]


def test_strangers_are_ignored() -> None:
    port = free_port()

    def knock() -> None:
        for _ in range(50):
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    return
            except OSError:
                continue

    with ThreadPoolExecutor(2) as pool:
        meeting = pool.submit(answers, node(0, 2), node(1, 2), port=port)
        pool.submit(knock)
        assert meeting.result() == [None, None]


@pytest.mark.parametrize("missing", ["NNODES", "GPUS_PER_NODE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_set_variables(missing: str) -> None:
    from nexttransformer.launch_environment import node_problems

    job = {"NNODES": "2", "GPUS_PER_NODE": "8", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert node_problems(job) == []
    (line,) = node_problems({name: value for name, value in job.items() if name != missing})
    assert line.startswith(f"{missing} not set although ")
    assert len(node_problems({})) == 1
