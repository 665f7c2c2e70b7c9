"""Every deliberately bad part or configuration is refused by the check that is meant for it, with its own figure."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nexttransformer import check_method
from nexttransformer.checking import require_config
from nexttransformer.config import load_method, resolve_method
from nexttransformer.errors import ProtocolError
from nexttransformer.protocol import FORMAL_V1
from nexttransformer.training import session
from nexttransformer.training.options import parse_options
from tests.checking import bad_parts

# part -> (checks that refuse it, what the first line says)
BEHAVIOURAL = {
    "futureleak": (
        "causality",
        r"changing tokens from 1 on changes earlier logits by up to \S+, expected 0; seen first in the mixer "
        r"'futureleak' of layer 0\. Output t may use",
    ),
    "lateleak": ("causality", r"seen first in the mixer 'lateleak' of layer 0"),
    "rowmixing": (
        "batch independence",
        r"a row's logits depend on the other rows by up to \S+, expected at most 1e-05; seen first in the mixer "
        r"'rowmixing' of layer 0",
    ),
    "lengthdependent": ("prefix consistency", r"the first 1 tokens alone give logits that differ .* by up to \S+,"),
    "forgetful": ("state passing", r"tokens 1 to 49 fed after the state of the earlier ones .* by up to \S+,"),
    "stateless": ("state passing", r"mixer 'stateless' returns no state"),
    "dropping": ("determinism", r"two equal passes differ by up to \S+, expected 0"),
    "loud": ("start", r"at the initial weights logits differ from the plain Transformer's by up to \S+, expected at"),
    "wrongbytes": ("decode state", r"keeps 32,768 bytes a row after 128 tokens of a tiny copy, .* declares 16,384\."),
    "broken": (
        "crash",
        r"the counted forward pass of a tiny copy raised RuntimeError: .* at bad_parts\.py:\d+ in change\. Fix",
    ),
    "float32output": ("precision", r"mixer 'float32output' returns torch\.float32 in a bfloat16 model"),
    "deadparameter": ("gradient", r"transformer\.h\.0\.attn\.gain: no gradient at all\. Remove the parameter"),
    "halfdead": ("gradient", r"transformer\.h\.0\.attn\.gain: no gradient in 32 rows \(32, 33, .*\.\.\.\)\."),
}
STRUCTURAL = {
    "undeclared": ("declaration", r"transformer\.h\.0\.attn\.scale, .*: parameter without tag and initialization\."),
    "buffered": ("declaration", r"transformer\.h\.0\.attn\.average: buffer \[1536\], which no checkpoint holds"),
    "reused": (
        "counts",
        r"transformer\.h\.\*\.attn\.c_proj\.weight: multiplies a token 2 times, declared are 1 uses\.",
    ),
    "hiddenweight": ("counts", r"transformer\.h\.\*\.attn\.hidden: multiplies a token 1 times, declared are 0 uses\."),
    "hiddenmixing": ("B5", r"take 65,536 multiply-adds per token in a tiny copy, declared are 0 "),
    "fastgain": ("tags", r"transformer\.h\.0\.attn\.gain \[1536\]: tag 'x0_lambda' is for the base's own parameters\."),
    "muongain": ("groups", r"parameter 'transformer\.h\.0\.attn\.gain': shape \[1536\] .* cannot take tag"),
    "wrongsize": ("tags", r"attn\.mixed\.weight \[1536, 1536\]: tag 'small' with both sides above 64"),
}
# What else must break: a part that is off in length is off in parts too, hidden costs exceed the budget or show twice.
ALSO = {
    "lengthdependent": {"state passing"},
    "stateless": {"decode state"},
    "dropping": {"causality"},
    "hiddenmixing": {"B1", "B2"},
    "wrongsize": {"B1", "B2"},
    "lateleak": {"prefix consistency", "state passing"},
    "futureleak": {"prefix consistency", "state passing"},
}


@pytest.fixture(autouse=True)
def bad_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    bad_parts.register(monkeypatch)


def write(folder: Path, **changes: Any) -> Path:
    """Writes a method file: dense attention with some keys changed."""
    method = {
        "schema": "nexttransformer.method/1",
        "method": "bad",
        "family": "attention",
        "name": "Bad",
        "schedule": {"pattern": "F"},
        "mixers": {"F": {"type": "attention"}},
        "mlp": {"type": "relu2", "width": 6144},
        "residual": {"type": "plain"},
    }
    path = folder / "bad.json"
    path.write_text(json.dumps({**method, **changes}))
    return path


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """Runs the command, which must refuse; returns (rule, message) of each refusal."""
    assert check_method.main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("1 checked, 1 refused") for line in lines)
    found = [re.fullmatch(r"  bad: refused: ([\w ]+): (.*)", line) for line in lines if line.startswith("  bad: ")]
    return [(match.group(1), match.group(2)) for match in found if match]


def formal_refusals(path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns what a formal launch of a method says once code and data are in order; empty if nothing."""
    monkeypatch.setattr(session, "check_formal_code", lambda options: None)
    monkeypatch.setattr(session, "check_formal_data", lambda data, protocol: [])
    words = ["--config", path, "--site-config", site, "--output", path.parent / "run", "--micro-batch", 8, "--formal"]
    options = parse_options([str(word) for word in words])
    try:
        session._check_formal(options, data=None)  # pyright: ignore[reportArgumentType]
    except ProtocolError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("part", BEHAVIOURAL)
def test_bad_behaviour_is_refused(part, tmp_path, capsys):
    rule, text = BEHAVIOURAL[part]
    found = refused(write(tmp_path, mixers={"F": {"type": part}}), capsys)
    messages = [message for name, message in found if name == rule]
    assert messages and re.search(text, messages[0]), found
    assert {name for name, _ in found} - {rule} == ALSO.get(part, set()), found


@pytest.mark.parametrize("part", STRUCTURAL)
def test_bad_structure_is_refused_by_the_command_and_by_formal_launches(
    part, tmp_path, capsys, prepared_site, monkeypatch
):
    rule, text = STRUCTURAL[part]
    path = write(tmp_path, mixers={"F": {"type": part}})
    found = refused(path, capsys)
    messages = [message for name, message in found if name == rule]
    assert messages and re.search(text, messages[0]), found
    assert {name for name, _ in found} - {rule} == ALSO.get(part, set()), found
    lines = formal_refusals(path, prepared_site, monkeypatch).splitlines()
    assert f"bad: {rule}: {messages[0]}" in lines


def test_a_formal_launch_of_a_good_method_is_not_refused(prepared_site, tmp_path, monkeypatch):
    assert formal_refusals(write(tmp_path), prepared_site, monkeypatch) == ""


def test_bad_residual_schemes(tmp_path, capsys):
    ((rule, message),) = refused(write(tmp_path, residual={"type": "leakysum"}), capsys)[:1]
    assert rule == "causality" and "not in a mixer" not in message
    found = dict(refused(write(tmp_path, residual={"type": "hiddensum"}), capsys))
    # 8 sublayers of a 64 x 64 matrix.
    assert "take 32,768 multiply-adds per token in products, its extra_macs declares 0." in found["counts"]


def test_off_budget(tmp_path, capsys, prepared_site, monkeypatch):
    path = write(tmp_path, mlp={"type": "relu2", "width": 4096})
    found = dict(refused(path, capsys))
    # 6 (773,886,168 - 23 * 2 * 1536 * 2048) FLOPs.
    assert found["B1"] == (
        "3,775,096,080 training FLOPs per token, -18.70% of the reference 4,643,317,008; allowed are 0.5%. "
        "Set 'mlp.width' to 6144 (+0.00%)."
    )
    assert found["B2"].startswith("MLP width 4096, the rule gives 6144: 6144, or if that fails B1 the multiple of 64")
    assert set(found) == {"B1", "B2"}
    assert f"bad: B1: {found['B1']}" in formal_refusals(path, prepared_site, monkeypatch)


def test_within_the_budget_but_not_by_the_rule(tmp_path, capsys):
    # 0.44 % at 6144, which the rule keeps; 6080 would be within the budget too.
    path = write(tmp_path, residual={"type": "hc"}, mlp={"type": "relu2", "width": 6080})
    assert [rule for rule, _ in refused(path, capsys)] == ["B2"]


def test_depth_of_its_own(tmp_path, capsys):
    path = write(tmp_path, schedule={"pattern": "F", "depth_offset": 1}, mlp={"type": "relu2", "width": 5696})
    found = refused(path, capsys)
    assert found[0][0] == "B2" and found[0][1].startswith("24 layers, expected 23. Remove 'schedule.depth_offset';")


def test_require_config_names_the_method(tmp_path):
    path = write(tmp_path, mlp={"type": "relu2", "width": 4096})
    with pytest.raises(ProtocolError, match=r"^bad: B1: .*\nbad: B2: .*$"):
        require_config(resolve_method(path, FORMAL_V1), FORMAL_V1)
    assert load_method(path).mlp.width == 4096
