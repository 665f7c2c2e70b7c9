"""Nodes of a job meet before their launchers start, so that a doubled, missing or different node has a name.

torch's own launchers would wait ten minutes for a node rank that nobody has. Node 0 listens on the job's
port; every other node sends one line of JSON there and waits for one line of verdict. Node 0 stops
listening before it answers, so the launcher's store finds the port free and no launcher mistakes this
meeting for it.
"""

import errno
import json
import secrets
import socket
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

from nexttransformer.errors import NodeError, join_problems

LIMIT_SECONDS = 600.0
# Names of nodes that are just being created may not resolve at once.
_NAME_SECONDS = 30.0
_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 10.0
_TOLD_AFTER_SECONDS = 20.0
_MAX_LINE_BYTES = 65536


@dataclass(frozen=True)
class NodeRecord:
    """What a node says about itself: `arguments` are the trainer's, `token` tells two nodes of one host apart."""

    node_rank: int
    num_nodes: int
    per_node: int
    arguments: list[str]
    host: str
    token: str


def own_record(node_rank: int, num_nodes: int, per_node: int, arguments: list[str]) -> NodeRecord:
    """Returns this node's record with a fresh token."""
    return NodeRecord(node_rank, num_nodes, per_node, arguments, socket.gethostname(), secrets.token_hex(8))


def meet(own: NodeRecord, address: str, port: int, *, limit_seconds: float = LIMIT_SECONDS) -> None:
    """Returns when all nodes of the job have met and agree.

    Args:
        own: this node.
        address: name or address of node 0, as every node was told.
        port: of the job; free again on node 0 when this returns.
        limit_seconds: how long other nodes may be late.

    Raises:
        NodeError: doubled node rank (both hosts), nodes that differ, nodes that did not come. On all nodes that met.
    """
    if own.num_nodes == 1:
        return
    deadline = time.monotonic() + limit_seconds
    if own.node_rank == 0:
        verdict = _host(own, address, port, deadline)
    else:
        verdict = _visit(own, address, port, deadline, threading.Event())
    if verdict:
        raise NodeError(verdict)


def record_problems(records: list[NodeRecord]) -> list[str]:
    """Returns what is wrong with the nodes that have come so far, one line each; the first is node 0."""
    problems = []
    by_rank: dict[int, NodeRecord] = {}
    for record in records:
        first = by_rank.setdefault(record.node_rank, record)
        if first is not record:
            where = f"on {first.host}, twice" if first.host == record.host else f"on {first.host} and on {record.host}"
            problems.append(f"NODE_RANK={record.node_rank} is used {where}. Give every node its own rank from 0.")
    head = records[0]
    for record in records[1:]:
        for name, mine, other in (
            ("NNODES", head.num_nodes, record.num_nodes),
            ("GPUS_PER_NODE", head.per_node, record.per_node),
            ("The trainer's arguments", head.arguments, record.arguments),
        ):
            if mine != other:
                problems.append(
                    f"{name} differs between nodes: {_show(mine)} on {head.host} (node 0), "
                    f"{_show(other)} on {record.host} (node {record.node_rank}). Start the same job on every node."
                )
    return problems


def _show(value: int | list[str]) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def _host(own: NodeRecord, address: str, port: int, deadline: float) -> str:
    """Node 0: collects the others and tells them the verdict; returns it, empty if all is well."""
    told_at = time.monotonic() + _TOLD_AFTER_SECONDS
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.create_server(("", port), backlog=own.num_nodes + 16))
        except OSError as error:
            taken = "another program or another node 0 uses it" if error.errno == errno.EADDRINUSE else error.strerror
            return f"MASTER_PORT={port}: cannot be used on {own.host}: {taken}. Choose another port for the whole job."
        # Another node 0 elsewhere would wait for ever beside this one, so each knocks at the common address.
        knock = _Knock(own, address, port, deadline)
        listener.settimeout(_RETRY_SECONDS)
        records, visitors = [own], []
        verdict = None
        while verdict is None:
            visitor = _accept(listener)
            if visitor is not None and visitor[1].token == own.token:
                _answer(visitor[0], "")
            elif visitor is not None:
                visitors.append(stack.enter_context(visitor[0]))
                records.append(visitor[1])
            problems = record_problems(records)
            missing = sorted(set(range(own.num_nodes)) - {record.node_rank for record in records})
            if problems or knock.verdict:
                verdict = join_problems(problems) or knock.verdict
            elif not missing:
                verdict = ""
            elif time.monotonic() > deadline:
                verdict = (
                    f"{len(missing)} of {own.num_nodes} nodes did not come to {own.host}, port {port}, in time: node "
                    f"{', '.join(map(str, missing))}. Check that every node runs and reaches MASTER_ADDR={address}."
                )
            elif time.monotonic() > told_at:
                told_at = float("inf")
                print(f"launch: node 0 on {own.host} waits for node {', '.join(map(str, missing))}.", flush=True)
        knock.stop.set()
        listener.close()
        # Whoever has not been heard was cut off by that; the thread must not knock at the launcher that starts next.
        knock.thread.join(timeout=_CONNECT_SECONDS)
        for visitor in visitors:
            _answer(visitor, verdict)
    return verdict


class _Knock:
    """Node 0's own visit to the common address, in a thread; it mostly meets itself and is told that all is well."""

    def __init__(self, own: NodeRecord, address: str, port: int, deadline: float) -> None:
        self.verdict = ""
        self.stop = threading.Event()
        self._arguments = (own, address, port, deadline, self.stop)
        self.thread = threading.Thread(target=self._run, name="knock", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.verdict = _visit(*self._arguments)


def _answer(visitor: socket.socket, verdict: str) -> None:
    with suppress(OSError):
        visitor.sendall(json.dumps({"verdict": verdict}).encode() + b"\n")
        # The visitor hangs up first: the side that does keeps the port busy for a while.
        visitor.recv(1)
    visitor.close()


def _accept(listener: socket.socket) -> tuple[socket.socket, NodeRecord] | None:
    """Returns the next node that knocks, None if nobody does or somebody else did."""
    try:
        visitor, _ = listener.accept()
    except TimeoutError:
        return None
    try:
        visitor.settimeout(_CONNECT_SECONDS)
        return visitor, NodeRecord(**json.loads(_read_line(visitor)))
    except (OSError, ValueError, TypeError):
        visitor.close()
        return None


def _visit(own: NodeRecord, address: str, port: int, deadline: float, stop: threading.Event) -> str:
    """Any other node: says who it is and returns the verdict, empty if all is well or after `stop`."""
    name_deadline = time.monotonic() + _NAME_SECONDS
    problem = ""
    while time.monotonic() < deadline and not stop.is_set():
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as host:
                host.sendall(json.dumps(asdict(own)).encode() + b"\n")
                host.settimeout(max(1.0, deadline - time.monotonic()) + 10.0)
                return json.loads(_read_line(host))["verdict"]
        except socket.gaierror as error:
            if time.monotonic() > name_deadline:
                return f"MASTER_ADDR={address}: no such host for {own.host} ({error.strerror}). Give node 0's name."
            problem = str(error.strerror)
        except (OSError, ValueError) as error:
            # Not there yet, or it went away: knock again.
            problem = str(error)
        stop.wait(_RETRY_SECONDS)
    if stop.is_set():
        return ""
    return (
        f"Node 0 did not answer at MASTER_ADDR={address}, MASTER_PORT={port} in time ({problem}; said by node "
        f"{own.node_rank} on {own.host}). Check that node 0 runs, and address, port and firewall."
    )


def _read_line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(4096)
        if not part or len(line) > _MAX_LINE_BYTES:
            raise ValueError("the other side hung up")
        line += part
    return line
