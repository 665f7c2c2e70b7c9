"""The command: options, exit codes, files; the guide's worked example from start to finish."""

import json
import re
import sys
from pathlib import Path

import pytest

from nexttransformer import check_method, registry
from nexttransformer.config import method_files
from nexttransformer.errors import ConfigError, ProtocolError

ROOT = Path(__file__).parents[2]


def test_one_method(capsys, tmp_path):
    path = tmp_path / "figures.json"
    assert check_method.main([str(method_files()["gdn_swa"]), "--json", str(path)]) == 0
    output = capsys.readouterr().out
    assert "gdn_swa: passed" in output and "-0.02 %" in output and "1 checked, 0 refused" in output
    record = json.loads(path.read_text())
    assert record["schema"] == "nexttransformer.check_method/1" and record["protocol"] == "formal-v1"
    assert record["methods"][0]["num_parameters"] == 1_402_875_432
    assert record["methods"][0]["findings"] == []


def test_markdown_prints_the_table_alone(capsys):
    assert check_method.main([str(method_files()["dense_full"]), "--markdown", "--protocol", "test-v1"]) == 0
    captured = capsys.readouterr()
    assert all(line.startswith("|") for line in captured.out.splitlines()) and "dense_full: passed" in captured.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "name method files or use --all, not both"),
        (["--all", "configs/linear/gdn.json"], "name method files or use --all, not both"),
        (["configs/linear/gdm.json"], "no such method configuration. Did you mean '"),
        ([str(ROOT / "configs/linear/gdn.json"), "--json", "/nowhere/x.json"], "no folder /nowhere"),
        ([str(ROOT / "configs/linear/gdn.json"), "--json", str(ROOT)], "is a folder. Name a file."),
    ],
)
def test_usage_errors(words, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_method.main(words)


def test_unknown_protocol():
    with pytest.raises(ProtocolError, match="formal-v2: unknown protocol. Did you mean 'formal-v1'"):
        check_method.main(["--all", "--protocol", "formal-v2"])


def test_all_problems_of_all_files_come_together(tmp_path):
    good = json.loads(method_files()["gdn"].read_text())
    for name, change in (("a", {"mixers": {"L": {"type": "gdm"}}}), ("b", {"widht": 3})):
        (tmp_path / f"{name}.json").write_text(json.dumps({**good, **change}))
    with pytest.raises(ConfigError) as error:
        check_method.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert "unknown mixer 'gdm'" in str(error.value) and "unknown key 'widht'" in str(error.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schedule": {"pattern": "F", "depth_offset": 10**9}}, "less than or equal to 1000"),
        ({"mixers": {"F": {"type": "attention", "window": 10**30}}}, "less than or equal to 2147483647"),
        ({"mixers": {"F": {"type": "attention", "window": "T/" + "9" * 5000}}}, "valid integer"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_built(change, text, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({**json.loads(method_files()["dense_full"].read_text()), **change}))
    with pytest.raises(ConfigError, match=text) as error:
        check_method.main([str(tmp_path / "a.json")])
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_worked_example_of_the_guide(language, capsys, tmp_path, monkeypatch):
    """Registers the template as the guide says, sees the refusal it prints, and passes with the width it names."""
    guide = (ROOT / f"docs/{language}/adding_a_method.md").read_text(encoding="utf-8")
    (line,) = re.findall(r'^    "(\w+)": "nexttransformer\.models\.mixers\.(\w+):(\w+)",$', guide, re.MULTILINE)
    (method,) = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", guide, re.DOTALL)]
    (shown,) = re.findall(r"```text\n(  my_method: refused: .*?)```", guide, re.DOTALL)
    assert f"cp docs/template_mixer.py src/nexttransformer/models/mixers/{line[1]}.py" in guide
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "template_mixer", raising=False)
    monkeypatch.setitem(registry.MIXERS, line[0], f"template_mixer:{line[2]}")
    path = tmp_path / "my_method.json"
    path.write_text(json.dumps(method))
    assert check_method.main([str(path)]) == 1
    assert shown in capsys.readouterr().out
    (width,) = set(re.findall(r"Set 'mlp\.width' to (\d+)", shown))
    method["mlp"]["width"] = int(width)
    path.write_text(json.dumps(method))
    assert check_method.main([str(path)]) == 0
    assert "my_method: passed" in capsys.readouterr().out and f'"width": {width}' in guide
    # The step that breaks the part changes a line that is there.
    (broken,) = re.findall(r"`(masked_fill\(distance_TS < 0, -torch\.inf\))`", guide)
    assert (ROOT / "docs/template_mixer.py").read_text().count(broken) == 1
    # The table of findings names every check that can refuse.
    sources = "".join(path.read_text() for path in (ROOT / "src/nexttransformer/checking").glob("*.py"))
    for rule in set(re.findall(r'Finding\(\s*"([\w ]+)"', sources)):
        assert f"`{rule}`" in guide, rule


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_methods_page_has_the_current_table_and_every_method(language):
    from nexttransformer.checking.structure import measure_method
    from nexttransformer.checking.table import markdown_table, sorted_reports
    from nexttransformer.config import resolve_method
    from nexttransformer.protocol import FORMAL_V1

    page = (ROOT / f"docs/{language}/methods.md").read_text(encoding="utf-8")
    reports = [measure_method(resolve_method(path, FORMAL_V1), FORMAL_V1) for path in method_files().values()]
    (table,) = re.findall(r"<!-- table -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert table == markdown_table(sorted_reports(reports)), "paste the output of check_method --all --markdown"
    described = re.findall(r"^- \*\*`(\w+)`\*\*.*(?:arXiv|karpathy|modded-nanogpt|huggingface)", page, re.MULTILINE)
    assert sorted(described) == sorted(method_files())
