"""For every id: break a valid run in one way, seal it again, and expect exactly the listed findings."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from nexttransformer import jsonio
from nexttransformer.audit.report import AuditRecord
from nexttransformer.audit.rules import RULES, RUN_RULE_IDS
from tests.audit.conftest import found
from tests.audit.edit import RunCopy

LAST = "checkpoint_00000020"
CURVE_LAST = "evaluations/val_curve_00000020.json"
CORE = "evaluations/core_00000020.json"
FINAL = "evaluations/final.json"
Mutation = Callable[[RunCopy], None]
CASES: list[tuple[str, Mutation, dict[str, str]]] = []


def case(**expected: str) -> Callable[[Mutation], Mutation]:
    """Adds a mutation with the findings it must give: id -> severity."""

    def add(function: Mutation) -> Mutation:
        CASES.append((function.__name__, function, expected))
        return function

    return add


def sealed(function: Mutation) -> Mutation:
    """Seals the run after the mutation."""

    def both(run: RunCopy) -> None:
        function(run)
        run.seal()

    both.__name__ = function.__name__
    return both


def unsealed(function: Mutation) -> Mutation:
    """Writes the logs as the mutation left them."""

    def both(run: RunCopy) -> None:
        function(run)
        run.write_logs()

    both.__name__ = function.__name__
    return both


def set_bpb(run: RunCopy, name: str, split: str, factor: float = 1.0, *, shift: float = 0.0) -> None:
    """Scales the nats of a split and shifts its BPB, everything else following; the event too."""
    with run.edit(name) as value:
        score = value["bpb"][split]
        bpb = score["bpb"] * factor + shift
        nats = score["nats"] * bpb / score["bpb"]
        score.update(nats=nats, nats_hex=nats.hex(), bpb=bpb)
    for event in run.events:
        if event["meta"].get("file") == name and split == ("val_final" if name == FINAL else "val_curve"):
            event["meta"]["bpb"] = bpb


@case(L1="error", T3="unjudged")
@sealed
def l1_curve_file_deleted(run: RunCopy) -> None:
    (run.root / "evaluations/val_curve_00000005.json").unlink()


@case(L1="error", T3="unjudged", E3="error")
@sealed
def l1_core_file_deleted(run: RunCopy) -> None:
    (run.root / CORE).unlink()


@case(L1="warning")
def l1_unknown_file(run: RunCopy) -> None:
    run.replace("notes.txt", b"skip: L2\n")


@case(L2="error")
def l2_not_finished(run: RunCopy) -> None:
    with run.edit("run_state.json") as value:
        value["status"] = "stopped"


@case(L2="error")
def l2_locked(run: RunCopy) -> None:
    run.replace("train.lock", b"{}")


@case(L2="error")
@sealed
def l2_no_end(run: RunCopy) -> None:
    del run.events[-1]


@case(L2="error")
@sealed
def l2_one_witness_says_smoke(run: RunCopy) -> None:
    with run.edit(FINAL) as value:
        value["mode"] = "smoke"


@case(L3="error")
def l3_other_method_in_one_file(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        value["config"]["method"] = value["method"]
    with run.edit(f"{LAST}/trainer_state.json") as value:
        value["method"] = "sssl"
    run.seal()


@case(L4="error")
def l4_unknown_key(run: RunCopy) -> None:
    run.event("stop_requested")["meta"]["note"] = "x"
    run.seal()


@case(L5="warning", L1="warning")
def l5_link(run: RunCopy) -> None:
    (run.root / "evaluation_mine.json").symlink_to(run.root / "run.json")


@case(L5="warning", L1="warning")
def l5_name(run: RunCopy) -> None:
    run.replace("evaluation of mine.json", b"{}")


@case(P1="error")
def p1_digest(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        digest = value["protocol"]["digest"]
        value["protocol"]["digest"] = ("0" if digest[0] != "0" else "1") + digest[1:]


@case(P2="error")
def p2_number_in_config(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        value["config"]["rope_base"] = 100_001.0


@case(P3="warning")
@sealed
def p3_dirty_attempt(run: RunCopy) -> None:
    run.event("attempt_start", 1)["meta"]["code"]["is_clean"] = False


@case(P3="error")
@sealed
def p3_other_source(run: RunCopy) -> None:
    run.event("attempt_start", 1)["meta"]["code"]["source_digest"] = "ab" * 32


@case(P4="error")
@sealed
def p4_parts_digest(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        value["code"]["parts_digest"] = "ab" * 32
    for number in (0, 1):
        run.event("attempt_start", number)["meta"]["code"]["parts_digest"] = "ab" * 32


@case(P5="error")
@sealed
def p5_other_torch(run: RunCopy) -> None:
    run.event("attempt_start", 1)["meta"]["versions"]["torch"] = "2.12.99"


@case(P5="warning")
@sealed
def p5_old_torch_everywhere(run: RunCopy) -> None:
    for number in (0, 1):
        run.event("attempt_start", number)["meta"]["versions"]["torch"] = "2.4.0"


def set_tuning(run: RunCopy, *num_warps: int) -> None:
    """Writes the tiles of the first attempt to the folder, and the digest of each attempt's into its start."""
    entry = {"key": [2, "torch.float32"], "kwargs": {}, "num_stages": 3, "num_ctas": 1, "maxnreg": None}
    for number, warps in enumerate(num_warps):
        kernels = {"fla.ops.utils.cumsum.chunk_local_cumsum_scalar_kernel": [{**entry, "num_warps": warps}]}
        document = {"schema": "nexttransformer.kernel_tuning/1", "gpu": "cpu", "triton": "3.7.1", "fla_core": "0.6.0"}
        content = {**document, "kernels": kernels}
        run.event("attempt_start", number)["meta"]["kernels"]["tuning"] = {
            "digest": jsonio.digest(content),
            "source": "run" if number else "measured",
        }
        if number == 0:
            run.replace("kernel_tuning.json", jsonio.pretty_bytes(content))


@case(P5="error")
@sealed
def p5_other_tuning(run: RunCopy) -> None:
    set_tuning(run, 2, 4)


@case()
@sealed
def p5_other_tuning_on_another_gpu(run: RunCopy) -> None:
    set_tuning(run, 2, 4)
    run.event("attempt_start", 1)["meta"]["gpus"] = {"NVIDIA H100": 2}


@case(P5="error")
@sealed
def p5_tuning_file_lost(run: RunCopy) -> None:
    set_tuning(run, 2, 2)
    (run.root / "kernel_tuning.json").unlink()


@case(P5="error")
@sealed
def p5_tuning_file_of_another_run(run: RunCopy) -> None:
    set_tuning(run, 2, 2)
    with run.edit("kernel_tuning.json") as value:
        value["triton"] = "3.6.0"


@case(L4="error")
@sealed
def l4_tuning_file(run: RunCopy) -> None:
    set_tuning(run, 2, 2)
    with run.edit("kernel_tuning.json") as value:
        del value["kernels"]


@case(P5="error", L1="warning")
@sealed
def p5_folder_in_the_place_of_the_tuning_file(run: RunCopy) -> None:
    set_tuning(run, 2, 2)
    (run.root / "kernel_tuning.json").unlink()
    (run.root / "kernel_tuning.json").mkdir()


@case(L4="error")
def l4_tuning_file_of_nothing(run: RunCopy) -> None:
    run.replace("kernel_tuning.json", b"null")


@case(P6="error")
@sealed
def p6_path_as_name(run: RunCopy) -> None:
    run.event("attempt_start", 1)["meta"]["gpus"] = {"/home/someone/gpu": 2}


@case(C1="error")
def c1_rows_in_constants(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        value["protocol"]["constants"]["global_batch_rows"] = 512


@case(C2="error")
@unsealed
def c2_row_missing(run: RunCopy) -> None:
    run.line(12)["rows"] -= 1


@case(C2="error")
@sealed
def c2_shares(run: RunCopy) -> None:
    run.event("attempt_start", 1)["meta"]["rank_rows"] = [5, 3]


@case(C3="error")
def c3_parameter_in_other_group(run: RunCopy) -> None:
    with run.edit(f"{LAST}/optimizer_index.json") as value:
        value["parameters"]["smear_gate.weight"]["group"] = "matrix"
    run.seal()


@case(C3="error")
def c3_base_rate(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        value["optimizer_groups"][0]["learning_rate"] *= 1.01


@case(C4="error")
@unsealed
def c4_rate(run: RunCopy) -> None:
    run.line(12)["learning_rates"][1] *= 1.0000001


@case(C5="error")
def c5_policy(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        value["precision_policy"] = "fp16"


@case(C6="error")
@sealed
def c6_seed(run: RunCopy) -> None:
    run.event("attempt_start", 1)["meta"]["seed"] += 1


@case(C7="error")
def c7_optimizer_count(run: RunCopy) -> None:
    with run.edit(f"{LAST}/trainer_state.json") as value:
        value["optimizer_updates"] -= 1
    run.seal()


@case(C7="error")
@sealed
def c7_after_nonfinite(run: RunCopy) -> None:
    position = run.events.index(run.event("checkpoint_saved", -2))
    meta = {"ranks": [0], "update": 15, "parameters": []}
    event = {**run.events[position], "key": "nonfinite", "value": "loss", "meta": meta, "update": 14}
    run.events.insert(position, event)


@case(D1="error")
def d1_tokenizer(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        value["data"]["tokenizer"] = "ab" * 32


@case(D2="error")
def d2_two_updates_swapped(run: RunCopy) -> None:
    third, fourth = run.line(3), run.line(4)
    third["rows_hash"], fourth["rows_hash"] = fourth["rows_hash"], third["rows_hash"]
    run.seal_chain()
    run.seal()


@case(D3="error")
def d3_bytes(run: RunCopy) -> None:
    with run.edit(FINAL) as value:
        score = value["bpb"]["val_final"]
        score["bpb"] *= score["bytes"] / (score["bytes"] + 1)
        score["bytes"] += 1
        run.event("evaluation", -1)["meta"]["bpb"] = score["bpb"]
    run.seal()


@case(M1="error")
def m1_count(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        value["model"]["num_parameters"] += 1


@case(M2="error")
def m2_flops(run: RunCopy) -> None:
    with run.edit("run.json") as value:
        value["model"]["training_flops_per_token"] = round(value["model"]["training_flops_per_token"] * 1.01)


def rewrite_weights(run: RunCopy, change: Callable[[dict], None]) -> None:
    """Writes the final weights again after a change, with their header's strings."""
    path = run.root / LAST / "model.safetensors"
    with safe_open(str(path), framework="pt") as file:
        tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata)


@case(M3="error")
@sealed
def m3_renamed_tensor(run: RunCopy) -> None:
    rewrite_weights(run, lambda tensors: tensors.update({"smear_lambda2": tensors.pop("smear_lambda")}))


@case(M6="warning")
@sealed
def m6_update_not_set(run: RunCopy) -> None:
    with run.edit(FINAL) as value:
        value["update"] = 0


@case(T1="error")
@unsealed
def t1_event_removed(run: RunCopy) -> None:
    run.events.remove(run.event("stop_requested"))


@case(T1="error", D2="unjudged")
@unsealed
def t1_line_removed(run: RunCopy) -> None:
    run.metrics.remove(run.line(12))


@case(T1="error")
@sealed
def t1_time_backwards(run: RunCopy) -> None:
    run.events[3]["time"] = "2020-01-01T00:00:00.000Z"


@case(T2="error")
@sealed
def t2_resumed_update(run: RunCopy) -> None:
    run.event("attempt_start", 1)["meta"]["resumed_update"] += 1


@case(T2="error")
@sealed
def t2_unknown_checkpoint(run: RunCopy) -> None:
    run.event("attempt_start", 1)["meta"]["resumed_complete_digest"] = "ab" * 32


@case(T3="error")
@sealed
def t3_extra_evaluation(run: RunCopy) -> None:
    event = run.event("evaluation", 2)
    run.events.insert(run.events.index(event), {**event, "update": 7})


@case(T3="error")
@sealed
def t3_evaluated_twice(run: RunCopy) -> None:
    event = run.event("evaluation", 2)
    run.events.insert(run.events.index(event), dict(event))


@case(T3="error")
def t3_file_changed(run: RunCopy) -> None:
    run.replace(CURVE_LAST, run.bytes(CURVE_LAST) + b"\n")


@case(T4="error")
@unsealed
def t4_one_row_less(run: RunCopy) -> None:
    run.line(12)["tokens_seen"] -= 128


@case(T5="warning")
@unsealed
def t5_mfu(run: RunCopy) -> None:
    run.line(12)["mfu_fraction"] = 1.3


@case(T5="warning")
@unsealed
def t5_repeated_update_disagrees(run: RunCopy) -> None:
    run.line(7, attempt=0)["loss_nats"] += 0.01


@case(N1="error")
@unsealed
def n1_first_loss(run: RunCopy) -> None:
    run.line(1)["loss_nats"] = 3.0


@case(N2="warning")
@unsealed
def n2_spike(run: RunCopy) -> None:
    run.line(15)["loss_nats"] *= 3


@case(N3="warning")
@sealed
def n3_curve_too_good(run: RunCopy) -> None:
    for path in sorted(run.root.glob("evaluations/val_curve_*.json")):
        set_bpb(run, f"evaluations/{path.name}", "val_curve", 0.1)
    set_bpb(run, FINAL, "val_curve", 0.1)
    set_bpb(run, FINAL, "val_final", 0.1)


@case(E1="error")
@sealed
def e1_bpb_lowered(run: RunCopy) -> None:
    with run.edit(FINAL) as value:
        value["bpb"]["val_final"]["bpb"] -= 0.001
        run.event("evaluation", -1)["meta"]["bpb"] = value["bpb"]["val_final"]["bpb"]


@case(E2="error")
@sealed
def e2_in_training_value(run: RunCopy) -> None:
    set_bpb(run, CURVE_LAST, "val_curve", shift=0.001)


@case(E3="error")
@sealed
def e3_task_removed(run: RunCopy) -> None:
    with run.edit(CORE) as value:
        del value["core"]["tasks"][3]


@case(E3="error")
@sealed
def e3_limit(run: RunCopy) -> None:
    with run.edit(CORE) as value:
        value["core"]["limit"] = 500


@case(E3="error")
@sealed
def e3_mean(run: RunCopy) -> None:
    with run.edit(CORE) as value:
        value["core"]["core_limited"] += 0.01


@case(E3="error")
@sealed
def e3_one_more_correct(run: RunCopy) -> None:
    with run.edit(CORE) as value:
        value["core"]["tasks"][0]["num_correct"] += 1


@case(E4="error")
@sealed
def e4_earlier_checkpoint(run: RunCopy) -> None:
    earlier = run.event("checkpoint_saved", -2)["meta"]
    digests = {key: earlier[key] for key in ("complete_digest", "weights_digest")}
    with run.edit(CURVE_LAST) as value:
        value["checkpoint"] = digests
    for event in run.events:
        if event["meta"].get("file") == CURVE_LAST:
            event["meta"]["complete_digest"] = digests["complete_digest"]


@case(K1="error")
def k1_flipped_byte(run: RunCopy) -> None:
    content = bytearray(run.bytes(f"{LAST}/model.safetensors"))
    content[-5] ^= 1
    run.replace(f"{LAST}/model.safetensors", bytes(content))


@case(K1="error", L1="warning")
def k1_extra_file(run: RunCopy) -> None:
    run.replace(f"{LAST}/extra.bin", b"x")


@case(K1="error", C1="unjudged")
def k1_no_marker(run: RunCopy) -> None:
    (run.root / LAST / "complete.json").unlink()


def put_torn(run: RunCopy, name: str, is_place: Callable[[bytes], bool]) -> None:
    """Inserts a half-written line before the first line that a function picks, or at the end."""
    lines = run.bytes(name).splitlines(keepends=True)
    place = next((number for number, line in enumerate(lines) if is_place(line)), len(lines))
    run.replace(name, b"".join([*lines[:place], b'{"attempt":0,"upd\n', *lines[place:]]))


def test_torn_lines_where_an_attempt_ended(run: RunCopy, audit: Callable[..., AuditRecord]) -> None:
    put_torn(run, "metrics.jsonl", lambda line: b'"attempt":1' in line)
    put_torn(run, "events.jsonl", lambda line: b'"attempt":1' in line)
    assert audit(run).findings == []


@case(L4="error")
def l4_torn_line_inside_an_attempt(run: RunCopy) -> None:
    put_torn(run, "metrics.jsonl", lambda line: b'"update":12' in line)


@case(L2="error")
def l2_a_line_behind_the_end(run: RunCopy) -> None:
    put_torn(run, "events.jsonl", lambda line: False)


@case(L2="error")
def l2_end_without_newline(run: RunCopy) -> None:
    run.replace("events.jsonl", run.bytes("events.jsonl")[:-1])


def test_the_valid_run_passes(run: RunCopy, audit: Callable[..., AuditRecord]) -> None:
    record = audit(run)
    assert record.findings == []
    assert (record.verdict, record.exit_code) == ("pass", 0)
    assert list(record.checks) == list(RUN_RULE_IDS) and len(record.checks) == 45
    deferred = {rule_id for rule_id, status in record.checks.items() if status == "deferred"}
    assert deferred == {"K2", "K3", "K4"} and {*record.checks.values()} == {"pass", "deferred"}
    assert (record.counts.attempts, record.counts.superseded_updates) == (2, 3)


@pytest.mark.parametrize(("mutate", "expected"), [each[1:] for each in CASES], ids=[each[0] for each in CASES])
def test_one_mutation_gives_exactly_its_findings(
    mutate: Mutation, expected: dict[str, str], run: RunCopy, audit: Callable[..., AuditRecord]
) -> None:
    mutate(run)
    record = audit(run)
    assert found(record) == set(expected.items()), json.dumps([each.model_dump() for each in record.findings], indent=1)
    code = 1 if "error" in expected.values() else 2 if "unjudged" in expected.values() else 0
    assert record.exit_code == code


def test_other_method(run: RunCopy, audit: Callable[..., AuditRecord]) -> None:
    assert found(audit(run, method="sssl")) == {("L3", "error")}


def test_three_planted_faults_are_three_findings(run: RunCopy, audit: Callable[..., AuditRecord]) -> None:
    with run.edit("run_state.json") as value:
        value["update"] = -1
    with run.edit("evaluations/val_curve_00000005.json") as value:
        value["bpbs"] = 1
    run.replace("evaluations/val_curve_00000010.json", run.bytes("evaluations/val_curve_00000010.json")[:200])
    run.seal()
    record = audit(run)
    listed = [finding for finding in record.findings if finding.id == "L4"]
    assert [finding.where for finding in listed] == [
        "evaluations/val_curve_00000005.json",
        "evaluations/val_curve_00000010.json",
        "run_state.json",
    ]
    assert "Did you mean 'bpb'?" in listed[0].message
    assert {finding.id for finding in record.findings if finding.severity == "error"} == {"L4"}
    assert record.exit_code == 1


def test_every_check_of_the_command_has_a_mutation() -> None:
    elsewhere = {"D4", "M4", "M5", "E5"}  # test_reference.py, test_behaviour.py, test_rescore.py
    covered = {rule_id for _, _, expected in CASES for rule_id in expected}
    assert covered | elsewhere == {rule_id for rule_id in RUN_RULE_IDS if "A" in RULES[rule_id].stages}


def test_same_run_same_bytes(run: RunCopy, audit: Callable[..., AuditRecord], clean_run: Path) -> None:
    run.line(12)["mfu_fraction"] = 1.3
    run.write_logs()
    first, second = audit(run), audit(run)
    assert first.to_bytes() == second.to_bytes()
    assert str(run.root) not in first.to_bytes().decode()
