"""Versions, policy table and verdict of the kernel self-check; kernels are stand-ins, damaged where the test says."""

import json
from dataclasses import replace

import pytest
import torch

from nexttransformer.config import method_files, resolve_method
from nexttransformer.errors import ProtocolError
from nexttransformer.ops import backends, fla_core, self_check
from nexttransformer.ops.backends import Versions, is_older, missing_package, unsupported_pair
from nexttransformer.ops.path_check import NOT_FINITE, check_path, error_ratio, limit_of
from nexttransformer.ops.probes import Sizes, get_probe, probe_names
from tests.ops.fla_stub import FlaStub

GOOD = Versions("2.12.1+cu130", "13.0", "580.95.05", "3.7.1", "0.6.0")
AFFECTED = replace(GOOD, torch="2.11.0+cu130", triton="3.6.0")
SIZES = Sizes(num_heads=2, key_dim=16, value_dim=16, num_tokens=128, mlp_width=64, vocab_size=128)
CPU = torch.device("cpu")


@pytest.fixture
def stub(monkeypatch):
    stub = FlaStub()
    stub.install(monkeypatch)
    monkeypatch.setattr(backends, "installed", lambda name: "1.0")
    monkeypatch.setattr(backends, "is_hopper", lambda device=None: True)
    use_versions(monkeypatch, stub, GOOD)
    backends.forget_choices()
    yield stub
    fla_core.set_guard_bypassed(False)
    backends.forget_choices()


def use_versions(monkeypatch, stub, versions):
    monkeypatch.setattr(backends, "versions", lambda: versions)
    stub.chunk_o.TRITON_ABOVE_3_7_1 = versions is GOOD


def decide(mode: str, op: str = "gated_delta_rule", all_agree: self_check.AllAgree = bool):
    return self_check.decide_path(op, SIZES, mode=mode, device=CPU, dtype=torch.bfloat16, all_agree=all_agree)


def choice(op="gated_delta_rule"):
    return next(found for found in backends.choices() if found["op"] == op)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("3.6.0", "3.7.1", True),
        ("3.7.1", "3.7.1", False),
        ("3.10.0", "3.7.1", False),
        ("3.7.1rc1", "3.7.1", True),
        ("3.7.1.dev2", "3.7.1", True),
        ("3.7.1+git123", "3.7.1", False),
        ("3.7.1.post1", "3.7.1", False),
        ("2.11.0+cu130", "2.7", False),
        ("2.6", "2.7", True),
    ],
)
def test_version_order(left, right, expected):
    assert is_older(left, right) is expected


@pytest.mark.parametrize(
    ("entry_point", "triton", "hopper", "is_supported"),
    [
        ("chunk_gated_delta_rule", "3.6.0", True, False),
        ("chunk_gated_delta_rule", "3.4.0", True, False),
        ("chunk_gated_delta_rule", "3.3.1", True, True),
        ("chunk_gated_delta_rule", "3.7.1", True, True),
        ("chunk_gated_delta_rule", "3.6.0", False, True),
        ("chunk_simple_gla", "3.5.1", True, False),
        ("chunk_kda", "3.6.0", True, True),
        ("chunk_kda", "3.2.0", False, False),
        ("chunk_gla", "3.6.0", True, True),
    ],
)
def test_supported_pairs(entry_point, triton, hopper, is_supported):
    problem = unsupported_pair(entry_point, replace(GOOD, triton=triton), hopper=hopper)
    assert (problem is None) == is_supported
    if problem is not None:
        assert triton in problem and "0.6.0" in problem and "\n" not in problem


def test_missing_packages(monkeypatch):
    assert "not installed" in str(missing_package(replace(GOOD, fla_core=None)))
    assert "0.5.2" in str(missing_package(replace(GOOD, fla_core="0.5.2")))
    assert "triton" in str(missing_package(replace(GOOD, triton=None)))
    monkeypatch.setattr(backends, "installed", lambda name: None if name == "einops" else "1.0")
    assert "einops" in str(missing_package(GOOD))


@pytest.mark.parametrize("mode", ["formal", "smoke", "open"])
@pytest.mark.parametrize("op", ["gated_delta_rule", "kimi_delta_attention"])
def test_supported_and_passing_runs(stub, mode, op):
    (check,) = decide(mode, op)
    assert check.passed and check.error is None
    assert set(check.ratios) == {"context", "odd_length_state", "strong_decay"}
    names = {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"}
    assert set(check.ratios["strong_decay"]) == names
    assert set(check.ratios["context"]) == names - {"final_state", "dinitial_state"}
    guard = "in_force" if op == "gated_delta_rule" else "none"
    assert choice(op) == {"op": op, "path": "fla", "reason": "self_check_passed", "guard": guard, "problem": None}


def test_supported_and_failing(stub):
    stub.damage["gdn"] = 1.05
    with pytest.raises(ProtocolError, match=r"failed its self-check: dk 0\.05.*report it as a bug"):
        decide("formal")
    with pytest.warns(RuntimeWarning, match="several times slower: dk"):
        (check,) = decide("open")
    assert not check.passed
    assert (choice()["path"], choice()["reason"]) == ("reference", "self_check_failed")


def test_formal_refuses_an_unsupported_pair_unmeasured(stub, monkeypatch):
    use_versions(monkeypatch, stub, AFFECTED)
    with pytest.raises(ProtocolError) as refusal:
        decide("formal")
    message = str(refusal.value)
    assert all(part in message for part in ("fla-core 0.6.0", "Triton 3.6.0", "3.7.1")) and "\n" not in message
    assert stub.calls == []


def test_formal_kda_runs_on_the_same_pair(stub, monkeypatch):
    use_versions(monkeypatch, stub, AFFECTED)
    decide("formal", "kimi_delta_attention")
    assert choice("kimi_delta_attention")["path"] == "fla"


def test_formal_refuses_a_bypassed_guard(stub):
    fla_core.set_guard_bypassed(True)
    with pytest.raises(ProtocolError, match="guard is bypassed"):
        decide("formal")


@pytest.mark.parametrize("mode", ["smoke", "open"])
def test_unsupported_pair_that_passes_runs_with_the_guard_bypassed(stub, monkeypatch, mode):
    use_versions(monkeypatch, stub, AFFECTED)
    (check,) = decide(mode)
    assert check.passed and check.guard == "bypassed"
    assert fla_core.is_guard_bypassed() and stub.chunk_o.TRITON_ABOVE_3_7_1 is True
    assert choice()["path"] == "fla" and choice()["guard"] == "bypassed" and "3.6.0" in choice()["problem"]
    fla_core.set_guard_bypassed(False)
    assert stub.chunk_o.TRITON_ABOVE_3_7_1 is False


def test_unsupported_pair_that_fails_takes_the_broadcast_route(stub, monkeypatch):
    use_versions(monkeypatch, stub, AFFECTED)
    stub.damage["gdn"] = 15.0
    with pytest.warns(RuntimeWarning, match="kda_broadcast") as caught:
        native, broadcast = decide("smoke")
    assert len(caught) == 1
    assert not native.passed and broadcast.passed and broadcast.entry_point == "chunk_kda"
    assert choice()["path"] == "kda_broadcast" and not fla_core.is_guard_bypassed()


def test_last_resort_is_the_reference(stub, monkeypatch):
    use_versions(monkeypatch, stub, AFFECTED)
    stub.damage |= {"gdn": 15.0, "kda": float("nan")}
    with pytest.warns(RuntimeWarning, match="several times slower"):
        checks = decide("open")
    assert [check.passed for check in checks] == [False, False]
    assert choice()["path"] == "reference"


def test_guard_in_force_raises_instead_of_training_wrong(stub, monkeypatch):
    use_versions(monkeypatch, stub, AFFECTED)
    check = check_path("gated_delta_rule", "fla", SIZES, device=CPU, guard="in_force")
    assert not check.passed and "RuntimeError: Triton >= 3.4.0" in str(check.error)


class PlainTuner:
    """Runs what it is given and notes what the kernels were asked for by then."""

    def __init__(self, stub):
        self.stub, self.calls = stub, []

    def complete(self, exercise):
        before = len(self.stub.calls)
        exercise()
        self.calls.append(self.stub.calls[before:])
        self.stub.calls.clear()

    def finish(self):
        return {"digest": "ab" * 32, "source": "measured"}


def test_kernels_are_tuned_before_they_are_checked(stub, monkeypatch):
    use_versions(monkeypatch, stub, AFFECTED)
    stub.damage["gdn"] = 15.0
    tuner = PlainTuner(stub)
    with pytest.warns(RuntimeWarning, match="kda_broadcast"):
        self_check.decide_path(
            "gated_delta_rule", SIZES, mode="smoke", device=CPU, dtype=torch.bfloat16, all_agree=bool, tuner=tuner
        )
    # Both routes, forward and backward of three cases each; the guard is off for the first.
    assert [len(calls) for calls in tuner.calls] == [6, 6]
    assert all("gdn" in call for call in tuner.calls[0]) and all("kda" in call for call in tuner.calls[1])


def test_streams_are_written_with_the_schemes_number_of_them():
    found = dict(self_check.fused_ops(resolve_method(method_files()["mhc_lite"], "formal-v1")))
    assert found["stream_write"].num_streams == 4 and found["relu_squared"].num_streams is None
    plain = self_check.fused_ops(resolve_method(method_files()["dense_full"], "formal-v1"))
    assert "stream_write" not in dict(plain)


@pytest.mark.parametrize(("method", "has_rounds"), [("mhc", True), ("mhc_lite", False), ("simple_hc", False)])
def test_only_the_scheme_with_sinkhorn_rounds_checks_them(method, has_rounds):
    found = dict(self_check.fused_ops(resolve_method(method_files()[method], "formal-v1")))
    assert ("sinkhorn" in found) == has_rounds and "stream_write" in found


def test_only_kernels_of_fla_core_are_tuned(stub):
    tuner = PlainTuner(stub)
    self_check.decide_path(
        "attention", SIZES, mode="open", device=CPU, dtype=torch.bfloat16, all_agree=bool, tuner=tuner
    )
    assert tuner.calls == []


def test_all_ranks_pass_or_none(stub):
    # This rank finds nothing wrong; the reduction says that another one failed its check.
    answers = iter([True, True, False])
    with pytest.raises(ProtocolError, match="another rank"):
        decide("formal", all_agree=lambda is_fine: next(answers) and is_fine)


@pytest.mark.parametrize("versions", [replace(GOOD, fla_core=None), replace(GOOD, fla_core="0.4.1")])
def test_without_a_usable_fla_core(stub, monkeypatch, versions):
    use_versions(monkeypatch, stub, versions)
    with pytest.raises(ProtocolError, match="Install"):
        decide("formal")
    with pytest.warns(RuntimeWarning, match="several times slower"):
        assert decide("open") == []
    assert choice()["reason"] == "no_fla_core"


def test_verdict_on_a_cpu_is_json_and_measures_nothing():
    config = resolve_method(method_files()["gdn_hybrid"], "test-v1")
    verdict = self_check.check_kernels(config, mode="open", device=CPU)
    assert json.loads(json.dumps(verdict, allow_nan=False)) == verdict
    assert verdict["passed"] and verdict["checks"] == [] and verdict["gpu"] is None and verdict["tuning"] is None
    assert {(c["op"], c["path"], c["reason"]) for c in verdict["choices"]} == {
        (op, "reference", "cpu")
        for op in (
            *("attention", "rotary_heads", "gated_delta_rule", "convolved_heads"),
            *("relu_squared", "cross_entropy", "lookup_gradient"),
        )
    }


def test_every_fused_operation_of_a_shipped_method_has_a_probe():
    for file in method_files().values():
        for op, sizes in self_check.fused_ops(resolve_method(file, "formal-v1")):
            assert get_probe(op).op == op in probe_names()
            assert (sizes.num_heads, sizes.key_dim, sizes.value_dim, sizes.num_tokens) == (12, 128, 128, 2048)
            assert any(case.num_tokens % 64 for case in get_probe(op).cases(sizes))


@pytest.mark.parametrize("window", [None, 20])
def test_attention_probe(window):
    sizes = SIZES._replace(window=window)
    check = check_path("attention", "native", sizes, device=CPU)
    assert check.passed, check
    assert set(check.ratios["context"]) == {"o", "dq", "dk", "dv"}


def test_metric():
    expected = torch.tensor([3.0, 4.0])
    assert error_ratio(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert error_ratio(torch.tensor([float("nan"), 4.0]), expected) == NOT_FINITE
    assert [limit_of(name) for name in ("o", "final_state", "dq", "dinitial_state", "dg", "dbeta", "dlog_f")] == [
        0.005,
        0.005,
        0.01,
        0.01,
        0.02,
        0.02,
        0.02,
    ]


@pytest.mark.parametrize("op", probe_names())
def test_references_of_all_probes(op):
    probe = get_probe(op)
    for case in probe.cases(SIZES):
        inputs = probe.make_inputs(SIZES, case, torch.Generator().manual_seed(0))
        again = probe.make_inputs(SIZES, case, torch.Generator().manual_seed(0))
        assert all(torch.equal(inputs[name], again[name]) and limit_of(f"d{name}") for name in inputs)
        outputs = probe.reference({name: x.double() for name, x in inputs.items()}, SIZES)
        assert all(torch.isfinite(x).all() and limit_of(name) for name, x in outputs.items())
        assert set(probe.run) == set(probe.entry_points)
