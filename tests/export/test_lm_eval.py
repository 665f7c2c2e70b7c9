"""lm-evaluation-harness on an exported folder: a small local task, and the same scores by hand."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from nexttransformer.config import config_from_dict
from nexttransformer.data.tokenizer import Tokenizer
from nexttransformer.export.weights import model_from_file
from tests.export.exported import ExportedRun, command

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")

QUESTIONS = [
    {"query": "The river runs to the", "choices": ["sea", "stone hammer"], "gold": 0},
    {"query": "She opened the", "choices": ["and of", "door"], "gold": 1},
    {"query": "In the year 1789 the people of", "choices": ["France", "zzzz qqqq"], "gold": 0},
    {"query": "He was an old", "choices": ["man", "xylophone the"], "gold": 1},
]
TASK = """task: river_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_target: gold
doc_to_choice: "{{{{choices}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
metadata:
  version: 1
"""


def nats(exported: ExportedRun, query: str, choice: str) -> float:
    folder = exported.package
    tokenizer = Tokenizer.load(folder / "tokenizer.tiktoken.json")
    config = config_from_dict(json.loads((folder / "model_config.json").read_text()))
    model = model_from_file(config, 20, folder / "model.safetensors")
    start, whole = ([tokenizer.bos_id, *tokenizer.encode(text)] for text in (query, f"{query} {choice}"))
    with torch.no_grad():
        row = model(torch.tensor([whole[:-1]]), torch.tensor([whole[1:]]))[0]
    return row[len(start) - 1 :].double().sum().item()


@pytest.mark.parametrize("model", ["nexttransformer", "hf"])
def test_scores_of_a_local_task(exported: ExportedRun, tmp_path: Path, model: str) -> None:
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    (tmp_path / "river.yaml").write_text(TASK.format(data=tmp_path / "questions.jsonl"))
    arguments = f"pretrained={exported.package}"
    if model == "hf":
        # The harness's own model works on the folder as it is.
        arguments += ",trust_remote_code=True,add_bos_token=True"
    words = ["--model", model, "--model_args", arguments, "--tasks", "river_questions", "--include_path", tmp_path]
    words += ["--device", "cpu", "--batch_size", 2, "--output_path", tmp_path / "out", "--log_samples"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    result = command("export.lm_eval_adapter", "run", *words, cwd=tmp_path, **offline)
    assert result.returncode == 0, result.stderr[-3000:]
    assert re.search(r"river_questions.*acc", result.stdout)
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == len(QUESTIONS)
    for row in rows:
        for choice, response in zip(row["doc"]["choices"], row["filtered_resps"], strict=True):
            expected = -nats(exported, row["doc"]["query"], choice)
            assert math.isclose(float(response[0]), expected, rel_tol=1e-4, abs_tol=1e-4)
