"""CORE: decisions, invariance to batching, processes and padding, and what happens when something fails."""

import base64
import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nexttransformer.config import method_files, resolve_method
from nexttransformer.evaluation.batches import make_batches
from nexttransformer.evaluation.bundle import (
    EXCERPT_FOLDER,
    LANGUAGE_MODELING,
    MULTIPLE_CHOICE,
    SCHEMA,
    Bundle,
    Task,
    load_bundle,
)
from nexttransformer.evaluation.core_result import CoreResult, TaskResult, centered
from nexttransformer.evaluation.decisions import SpanScores, decide
from nexttransformer.evaluation.preparation import prepare_core
from nexttransformer.evaluation.questions import PromptRules, TaskQuestions, make_questions
from nexttransformer.evaluation.runner import BatchRunner
from nexttransformer.models import Decoder, build_model
from nexttransformer.protocol import BUNDLE_TASKS_DIGESTS, EXCERPT_BUNDLE, TEST_V1
from tests.evaluation.core_inputs import RULES, bundle_of, choice, decisions, mixed_bundle, score, task
from tests.evaluation.echo import BOS, EchoModel, EchoTokenizer
from tests.evaluation.test_prompts import GRASS, LM_TASK, MC_TASK, SCHEMA_ROW, SUMS

# Echo model on the shipped excerpt: correct rows of the 22 tasks.
EXCERPT_ECHO = [3, 0, 0, 5, 1, 9, 3, 6, 3, 2, 6, 6, 5, 0, 3, 5, 2, 0, 0, 0, 6, 3]

# Rows, baselines v1 and v2, accuracy of DCLM's C4 412M model, rows whose gold index is 0 (specification, section 3).
TABLE = {
    "hellaswag_zeroshot": (10042, 25, 25, 0.380104, 2515),
    "jeopardy": (2117, 0, 0, 0.001020, 0),
    "bigbench_qa_wikidata": (20321, 0, 0, 0.438906, 0),
    "arc_easy": (2376, 25, 25, 0.421717, 565),
    "arc_challenge": (1172, 25, 25, 0.232082, 261),
    "copa": (100, 50, 50, 0.610000, 55),
    "commonsense_qa": (1221, 20, 40.3, 0.343980, 239),
    "piqa": (1838, 50, 50, 0.678455, 910),
    "openbook_qa": (500, 25, 25, 0.308000, 138),
    "lambada_openai": (5153, 0, 0, 0.334562, 0),
    "hellaswag": (10042, 25, 25, 0.382892, 2515),
    "winograd": (273, 50, 50, 0.582418, 137),
    "winogrande": (1267, 50, 50, 0.503552, 628),
    "bigbench_dyck_languages": (1000, 0, 0, 0.017000, 0),
    "agi_eval_lsat_ar": (230, 20, 25, 0.178261, 52),
    "bigbench_cs_algorithms": (1320, 0, 0, 0.356818, 0),
    "bigbench_operators": (210, 0, 0, 0.109524, 0),
    "bigbench_repeat_copy_logic": (32, 0, 0, 0.000000, 0),
    "squad": (10570, 0, 0, 0.054115, 0),
    "coqa": (7983, 0, 0, 0.100463, 0),
    "boolq": (3270, 62, 62, 0.528746, 1237),
    "bigbench_language_identification": (10000, 9.1, 25, 0.251000, 2502),
}


@pytest.mark.parametrize(
    ("column", "core_v1", "core_v2", "tolerance"), [(3, 0.131045, 0.107318, 1e-6), (4, -0.016604, -0.043023, 1e-6)]
)
def test_centering_reproduces_published_values(column: int, core_v1: float, core_v2: float, tolerance: float) -> None:
    accuracies = {k: row[column] if column == 3 else row[column] / row[0] for k, row in TABLE.items()}
    for baseline, expected in ((1, core_v1), (2, core_v2)):
        mean = sum(centered(accuracies[label], row[baseline]) for label, row in TABLE.items()) / 22
        assert mean == pytest.approx(expected, abs=tolerance)


def test_the_excerpt_has_the_tables_tasks_and_baselines() -> None:
    bundle = load_bundle(EXCERPT_FOLDER, BUNDLE_TASKS_DIGESTS[EXCERPT_BUNDLE])
    assert {t.label: (t.baseline_v1, t.baseline_v2) for t in bundle.tasks} == {k: row[1:3] for k, row in TABLE.items()}
    assert [t.label for t in bundle.tasks] == list(TABLE)


def result_of(corrects: dict[str, np.ndarray], **changes: Any) -> CoreResult:
    tasks = [
        TaskResult(
            dataclasses.replace(task(LANGUAGE_MODELING, label=label), baseline_v1=row[1], baseline_v2=row[2]),
            TaskQuestions(num_rows=len(corrects[label])),
            corrects[label],
            0,
            None,
        )
        for label, row in TABLE.items()
    ]
    values = {"is_excerpt": False, "bundle_digest": "0" * 64, "limit": None, "path": "shared"}
    return CoreResult(**{"tasks": tasks, "batch_tokens": 1, "num_split_batches": 0, **values, **changes})


def test_core_means_and_labels_of_a_result() -> None:
    always_zero = {k: np.arange(row[0]) < row[4] for k, row in TABLE.items()}
    result = result_of(always_zero)
    assert result.core_v1 == pytest.approx(-0.016604, abs=1e-6)
    assert result.core_v2 == pytest.approx(-0.043023, abs=1e-6)
    assert (result.core_limited, result.errors) == (None, [])
    for limited in (result_of(always_zero, limit=50), result_of(always_zero, is_excerpt=True)):
        assert (limited.core_v1, limited.core_v2, limited.core_limited) == (None, None, result.core_v1)
    bits = result.to_json(tokenizer_digest="1" * 64)["tasks"][5]["correct_bits"]
    assert np.unpackbits(np.frombuffer(base64.b64decode(bits), np.uint8))[:100].tolist() == [1] * 55 + [0] * 45


def scores_of(a_task: Task, rows: list[dict[str, Any]]) -> SpanScores:
    """Echo scores of the first row in file order (the worked examples are not shuffled)."""
    question = make_questions(0, a_task, rows, EchoTokenizer(), RULES).questions[0]
    runner = BatchRunner(EchoModel(), torch.device("cpu"), pad_id=BOS)
    [(_, scores)] = runner.run(make_batches([question], 16_384, "shared"))
    assert isinstance(scores, SpanScores)
    assert [(answer.is_correct, answer.error) for answer in decide((question,), scores)] == [(True, None)]
    return scores


def test_worked_examples_have_the_published_scores_and_decisions() -> None:
    grass = scores_of(MC_TASK, GRASS)
    assert grass.nats[:2].sum() == pytest.approx(13.989542, abs=1e-6)
    assert grass.nats[:2].mean() == pytest.approx(6.994771, abs=1e-6)
    assert grass.nats[2:] == pytest.approx([7.768208], abs=1e-6)
    hit = scores_of(task(SCHEMA), [SCHEMA_ROW])
    assert [hit.nats[hit.segments == option].mean() for option in range(2)] == pytest.approx(
        [5.798241, 5.896215], abs=1e-6
    )
    four = scores_of(LM_TASK, SUMS)
    assert four.nats == pytest.approx([0.232668, 1.624198, 0.578054, 1.658991, 1.624809], abs=1e-6)
    assert four.is_argmax.all()


def test_echo_model_on_the_excerpt_is_pinned() -> None:
    bundle = load_bundle(EXCERPT_FOLDER, BUNDLE_TASKS_DIGESTS[EXCERPT_BUNDLE])
    result = score(EchoModel(), EchoTokenizer(), bundle)
    assert [each.num_correct for each in result.tasks] == EXCERPT_ECHO
    assert result.core_limited == pytest.approx(0.0636724856696196, abs=1e-12)
    assert (result.core_v1, result.core_v2) == (None, None)


def covering_methods() -> list[str]:
    """Few methods that together use every mixer and every residual scheme."""
    parts = {}
    for method, path in method_files().items():
        config = resolve_method(path, TEST_V1)
        parts[method] = {layer["type"] for layer in config.layers} | {config.residual["type"]}
    chosen, missing = [], set().union(*parts.values())
    while missing:
        best = max(parts, key=lambda method: (len(parts[method] & missing), -len(method)))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen)


VARIATIONS = [
    {"batch_tokens": 1},
    {"batch_tokens": 300},
    {"world_size": 2},
    {"world_size": 3, "batch_tokens": 300},
    {"num_extra_columns": 1},
    {"num_extra_columns": 37, "batch_tokens": 300},
    {"path": "plain"},
    {"path": "plain", "world_size": 2, "batch_tokens": 300},
]


def assert_invariant(model: Any, bundle: Bundle, variations: list[dict[str, Any]]) -> None:
    expected = decisions(score(model, EchoTokenizer(), bundle))
    assert any(any(rows) for rows in expected)
    for options in variations:
        assert decisions(score(model, EchoTokenizer(), bundle, **options)) == expected, options


def random_model(method: str) -> Decoder:
    """A small model away from the protocol's zeros, so that every part matters."""
    model = build_model(resolve_method(method_files()[method], TEST_V1), seed=3).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def test_decisions_of_the_echo_model_do_not_depend_on_batching() -> None:
    assert_invariant(EchoModel(), mixed_bundle(), VARIATIONS)


@pytest.mark.parametrize("method", covering_methods())
def test_decisions_of_small_random_models_do_not_depend_on_batching(method: str) -> None:
    few = [{"batch_tokens": 1, "num_extra_columns": 37}, {"path": "plain", "world_size": 2}]
    assert_invariant(random_model(method), mixed_bundle(num_rows=4, num_shots=1), few)


@pytest.mark.slow
@pytest.mark.parametrize("method", method_files())
def test_decisions_of_all_methods_do_not_depend_on_batching(method: str) -> None:
    assert_invariant(random_model(method), mixed_bundle(), VARIATIONS)


def test_every_form_of_a_row_is_used() -> None:
    prepared = prepare_core(mixed_bundle(), EchoTokenizer(), RULES)
    questions = [question for each in prepared for question in each.questions]
    shared, plain = (make_batches(questions, 300, path) for path in ("shared", "plain"))
    assert {batch.num_prefix_tokens > 0 for batch in shared} == {True, False}
    assert {batch.num_prefix_tokens for batch in plain} == {0}
    assert any(question.has_letter_spans for question in questions)
    for batches in (shared, plain):
        assert sorted((q.task, q.index) for b in batches for q in b.questions) == sorted(
            (q.task, q.index) for q in questions
        )
        assert all(b.num_padded_tokens <= 300 or len(b.questions) == 1 for b in batches)
    assert sum(b.num_padded_tokens for b in shared) < 0.6 * sum(b.num_padded_tokens for b in plain)


class Constant:
    """Gives the same logits everywhere."""

    def __init__(self, logits: list[float]) -> None:
        self.logits_V = torch.tensor(logits)

    def hidden(self, ids_BT: Tensor, *, state: Any = None, want_state: bool = False) -> tuple[Tensor, Any]:
        return torch.zeros(*ids_BT.shape, 1), (ids_BT,) if want_state else None

    def head_logits(self, h: Tensor) -> Tensor:
        return self.logits_V.expand(*h.shape[:-1], -1)


UNIFORM = [0.0] * 257


@pytest.mark.parametrize("path", ["shared", "plain"])
def test_first_index_wins_an_exact_tie(path: str) -> None:
    rows = [choice("q", ["A", "B", "C"], gold) for gold in (0, 1, 2)]
    result = score(Constant(UNIFORM), EchoTokenizer(), bundle_of((task(MULTIPLE_CHOICE, rows=3), rows)), path=path)
    assert result.tasks[0].num_correct == 1
    assert result.tasks[0].num_near_ties == 3


def test_lowest_id_wins_equal_maxima() -> None:
    logits = [0.0] * 257
    logits[ord("b")] = logits[ord("d")] = logits[ord(" ")] = 1.0
    rows = [{"context": "x", "continuation": letter} for letter in "bd"]
    flat = score(Constant(logits), EchoTokenizer(), bundle_of((task(LANGUAGE_MODELING, rows=2), rows)))
    # The space (32) is below both letters, so it is right and they are wrong.
    assert (flat.tasks[0].num_correct, flat.tasks[0].num_near_ties) == (0, 2)
    logits[ord(" ")] = 0.0
    spaceless = [{"context": "x", "continuation": letter} for letter in "bd"]
    a_task = dataclasses.replace(task(LANGUAGE_MODELING, rows=2), delimiter="")
    result = score(Constant(logits), EchoTokenizer(), bundle_of((a_task, spaceless)))
    assert result.tasks[0].num_correct == 1


@pytest.mark.parametrize("path", ["shared", "plain"])
def test_an_empty_span_never_wins_unless_it_is_option_0(path: str) -> None:
    rows = [choice("q", ["ab", "abc"], 0), choice("q", ["abc", "ab"], 0), choice("q", ["abc", "ab"], 1)]
    result = score(Constant(UNIFORM), EchoTokenizer(), bundle_of((task(MULTIPLE_CHOICE, rows=3), rows)), path=path)
    assert result.tasks[0].made.num_empty_spans == 3
    assert result.tasks[0].num_correct == 2


class Broken(EchoModel):
    """Fails as told: on batches wider than a limit, by an exception, or with NaN after a marker byte."""

    def __init__(
        self, *, max_rows: int | None = None, fails_on: int | None = None, nan_after: int | None = None
    ) -> None:
        super().__init__()
        self.max_rows, self.fails_on, self.nan_after = max_rows, fails_on, nan_after

    def hidden(self, ids_BT: Tensor, *, state: Any = None, want_state: bool = False) -> Any:
        if self.max_rows is not None and len(ids_BT) > self.max_rows:
            raise torch.OutOfMemoryError("out of memory")
        if self.fails_on is not None and (ids_BT == self.fails_on).any():
            raise RuntimeError("kernel\nfailed")
        return super().hidden(ids_BT, state=state, want_state=want_state)

    def head_logits(self, h: Tensor) -> Tensor:
        logits = super().head_logits(h)
        if self.nan_after is not None:
            logits[h[..., 0] == self.nan_after] = float("nan")
        return logits


def test_a_batch_that_does_not_fit_is_halved_and_counted() -> None:
    expected = decisions(score(EchoModel(), EchoTokenizer(), mixed_bundle()))
    result = score(Broken(max_rows=4), EchoTokenizer(), mixed_bundle(), world_size=2)
    assert decisions(result) == expected
    assert result.num_split_batches > 3
    failed = score(Broken(max_rows=2), EchoTokenizer(), mixed_bundle())
    assert [each.error is not None for each in failed.tasks] == [False, True, False, False]
    assert "out of memory" in str(failed.tasks[1].error)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Broken(fails_on=ord("!")), r"RuntimeError: kernel failed \(in hidden, line \d+\)"),
        (Broken(nan_after=ord("!")), r"row \d+: nats per token are not finite"),
    ],
)
def test_a_failed_task_leaves_the_others_and_no_core_value(model: Broken, message: str) -> None:
    bundle = mixed_bundle()
    marked = {name: list(rows) for name, rows in bundle.rows.items()}
    marked["words.jsonl.gz"][4] = choice("Item!", ["!red", "!blue", "!green"], 1)
    bundle = dataclasses.replace(bundle, rows=marked)
    result = score(model, EchoTokenizer(), bundle, batch_tokens=1)
    words = result.tasks[1]
    assert words.error is not None and re.search(message, words.error)
    assert (words.num_correct, words.accuracy, words.to_json()["correct_bits"]) == (None, None, None)
    assert [each.error for each in result.tasks if each.task.label != "words"] == [None] * 3
    assert (result.core_v1, result.core_v2, result.core_limited) == (None, None, None)
    assert any(line.startswith("words: ") for line in result.errors)


def test_a_missing_file_and_a_long_prompt_fail_their_tasks_only() -> None:
    bundle = mixed_bundle()
    bundle = dataclasses.replace(bundle, rows={k: v for k, v in bundle.rows.items() if k != "schema.jsonl.gz"})
    longest = max(each.max_prompt_tokens for each in prepare_core(bundle, EchoTokenizer(), RULES))
    result = score(EchoModel(), EchoTokenizer(), bundle, rules=PromptRules(2048, longest - 1, is_strict=True))
    errors = {each.task.label: each.error for each in result.tasks if each.error}
    assert errors.pop("schema") == "schema.jsonl.gz is missing"
    assert list(errors.values()) == [f"longest prompt has {longest} tokens, at most {longest - 1} allowed"]
    assert sum(each.num_correct is not None for each in result.tasks) == 2


def test_rows_answered_twice_or_never_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from nexttransformer.evaluation import core

    original = core.decide
    monkeypatch.setattr(core, "decide", lambda questions, scores: original(questions, scores)[1:])
    never = score(EchoModel(), EchoTokenizer(), mixed_bundle())
    assert any("answered 0 times, expected once" in str(each.error) for each in never.tasks)
    monkeypatch.setattr(core, "decide", lambda questions, scores: original(questions, scores) * 2)
    twice = score(EchoModel(), EchoTokenizer(), mixed_bundle())
    assert all("answered twice" in str(each.error) for each in twice.tasks)
