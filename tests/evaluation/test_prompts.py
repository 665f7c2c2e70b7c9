"""Sampling, rendering and spans, against the worked values of the specification."""

import random

import numpy as np
import pytest

from nexttransformer.errors import ConfigError, DataError
from nexttransformer.evaluation import prompts
from nexttransformer.evaluation.bundle import LANGUAGE_MODELING, MULTIPLE_CHOICE, SCHEMA
from nexttransformer.evaluation.questions import PromptRules, TaskQuestions, make_questions
from tests.evaluation.core_inputs import ANSWER, RULES, bundle_of, choice, decisions, mixed_bundle, score, task
from tests.evaluation.echo import BOS, EchoModel, EchoTokenizer

GRASS = [choice("Grass?", ["green", "grey"], 0), choice("Sky?", ["red", "blue"], 1)]
MC_TASK = task(MULTIPLE_CHOICE, delimiter=ANSWER, shots=1, rows=2)
SCHEMA_ROW = {"context_options": ["It hit Ann", "It hit Joan"], "continuation": "so she cried.", "gold": 0}
SUMS = [
    {"context": " Two plus two is ", "continuation": "four"},
    {"context": "One plus three is ", "continuation": "four"},
]
LM_TASK = task(LANGUAGE_MODELING, shots=1, rows=2)


def unshuffled(a_task, rows, rules: PromptRules = RULES) -> TaskQuestions:
    return make_questions(0, a_task, rows, EchoTokenizer(), rules)


def test_shuffle_and_shots_are_the_published_draws() -> None:
    rows = [{"i": i} for i in range(10)]
    assert [row["i"] for row in prompts.evaluation_rows(rows)] == [0, 3, 7, 2, 1, 6, 4, 5, 8, 9]
    assert [row["i"] for row in prompts.evaluation_rows(rows, limit=3)] == [0, 3, 7]
    assert rows == [{"i": i} for i in range(10)]
    assert [prompts.shot_indices(i, 10, 3) for i in range(3)] == [[8, 2, 1], [7, 8, 4], [9, 8, 6]]
    assert prompts.shot_indices(0, 12, 10) == [8, 2, 1, 10, 7, 5, 9, 6, 4, 11]
    assert prompts.shot_indices(0, 3270, 10) == [3188, 1806, 479, 31, 372, 2385, 144, 2751, 2839, 344]


@pytest.mark.parametrize(("num_rows", "num_fewshot"), [(11, 10), (12, 3), (100, 10), (3000, 10)])
def test_shots_equal_a_sample_of_the_list_of_other_rows(num_rows: int, num_fewshot: int) -> None:
    for index in (0, 1, num_rows // 2, num_rows - 1):
        others = [other for other in range(num_rows) if other != index]
        expected = random.Random(1234 + index).sample(others, num_fewshot)
        assert prompts.shot_indices(index, num_rows, num_fewshot) == expected


def test_multiple_choice_example() -> None:
    texts = prompts.prompts(MC_TASK, GRASS, 0)
    assert texts == [f"Sky?\nAnswer: blue\n\nGrass?\nAnswer: {word}" for word in ("green", "grey")]
    question = unshuffled(MC_TASK, GRASS).questions[0]
    assert [question.num_tokens(option) for option in range(2)] == [40, 39]
    assert question.spans == ((38, 40), (38, 39))
    assert bytes(question.ids(0)[38:].tolist()) == b"en"
    assert question.ids(0)[0] == BOS


def test_schema_example() -> None:
    question = unshuffled(task(SCHEMA), [SCHEMA_ROW]).questions[0]
    assert question.spans == ((10, 25), (11, 26))
    assert bytes(question.ids(1)[11:].tolist()) == b"n so she cried."


def test_language_modeling_example() -> None:
    without, with_answer = prompts.prompts(LM_TASK, SUMS, 0)
    assert without == "One plus three is four\n\nTwo plus two is"
    assert with_answer == without + " four"
    question = unshuffled(LM_TASK, SUMS).questions[0]
    assert (question.spans, question.num_tokens(0)) == (((40, 45),), 45)


def test_schema_options_that_are_equal_never_ask_for_the_first_token() -> None:
    row = {"context_options": ["Same", "Same"], "continuation": "end.", "gold": 1}
    question = unshuffled(task(SCHEMA), [row]).questions[0]
    assert question.spans == ((1, 10), (1, 10))


def test_whitespace_inside_fields_survives() -> None:
    piqa = task(MULTIPLE_CHOICE, delimiter=ANSWER)
    assert prompts.prompts(piqa, [choice("Question: dresser\n", ["a"], 0)], 0) == ["Question: dresser\n\nAnswer: a"]
    letters = task(MULTIPLE_CHOICE)
    assert prompts.prompts(letters, [choice("Answer: ", ["A"], 0)], 0) == ["Answer:  A"]
    assert prompts.prompts(letters, [choice("He", [" ran."], 0)], 0) == ["He  ran."]
    coqa = [{"context": "Story\nAnswer: ", "continuation": "no "}]
    assert prompts.prompts(task(LANGUAGE_MODELING), coqa, 0) == ["Story\nAnswer:", "Story\nAnswer: no "]


@pytest.mark.parametrize("by_block", [True, False])
def test_encoding_by_block_equals_encoding_whole_prompts(by_block: bool) -> None:
    rules = PromptRules(2048, 20_480, is_strict=True, by_block=by_block)
    bundle = mixed_bundle()
    for a_task in bundle.tasks:
        rows = prompts.evaluation_rows(bundle.rows[a_task.file])
        for index, question in enumerate(unshuffled(a_task, rows, rules).questions):
            texts = prompts.prompts(a_task, rows, index)
            texts = texts[1:] if a_task.kind == LANGUAGE_MODELING else texts
            for option, text in enumerate(texts):
                assert question.ids(option).tolist() == [BOS, *text.encode()]


def test_blocks_that_start_with_a_space_are_encoded_as_whole_prompts() -> None:
    class Fused(EchoTokenizer):
        """A blank line and the space behind it are one token, so blocks may not be cut apart there."""

        def encode(self, text: str) -> list[int]:
            return [255 if piece == "\n\n " else ord(piece) for piece in _pieces(text)]

    def _pieces(text: str) -> list[str]:
        parts = text.split("\n\n ")
        return [piece for part in parts for piece in ["\n\n ", *part]][1:]

    rows = [choice(" a", ["b", "c"], 0), choice(" d", ["e", "f"], 0)]
    question = make_questions(0, task(MULTIPLE_CHOICE, shots=1, rows=2), rows, Fused(), RULES).questions[0]
    assert 255 in question.ids(0)


def test_text_of_a_special_token_is_ordinary_text() -> None:
    pytest.importorskip("tiktoken")
    import tiktoken

    class Tokenizer:
        bos_id = 256
        encoding = tiktoken.Encoding(
            "bytes",
            pat_str=r".|\n",
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|bos|>": 256},
        )

        def encode(self, text: str) -> list[int]:
            return self.encoding.encode_ordinary(text)

    question = make_questions(
        0, task(MULTIPLE_CHOICE), [choice("Say <|bos|>", ["a", "b"], 0)], Tokenizer(), RULES
    ).questions[0]
    assert np.count_nonzero(question.ids(0) == 256) == 1


class Merging(EchoTokenizer):
    """The bytes "s f" are one token, so a prompt is no token prefix of itself plus an answer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode().replace(b"s f", b"\xff"))


def test_a_prompt_that_is_no_token_prefix_is_counted_and_fails_a_formal_evaluation() -> None:
    lenient = PromptRules(2048, 20_480, is_strict=False)
    rows = [{"context": "Two plus two is", "continuation": "four"}]
    made = make_questions(0, task(LANGUAGE_MODELING), rows, Merging(), lenient)
    assert (made.num_prefix_fallbacks, made.error) == (1, None)
    assert made.questions[0].spans == ((15, 19),)
    strict = make_questions(0, task(LANGUAGE_MODELING), rows, Merging(), RULES)
    assert strict.num_prefix_fallbacks == 1 and strict.error is not None and strict.questions == []


def test_counts_of_long_prompts_and_the_maximum() -> None:
    rows = [choice("x" * length, ["a", "b"], 0) for length in (5, 20, 40)]
    made = unshuffled(task(MULTIPLE_CHOICE), rows, PromptRules(20, 50, is_strict=True))
    assert (made.num_prompts, made.max_prompt_tokens, made.num_beyond_context, made.error) == (6, 43, 4, None)
    failed = unshuffled(task(MULTIPLE_CHOICE), rows, PromptRules(20, 42, is_strict=True))
    assert failed.max_prompt_tokens == 43
    assert failed.error == "longest prompt has 43 tokens, at most 42 allowed"


def test_a_foreign_model_keeps_the_last_tokens() -> None:
    rules = PromptRules(2048, 20_480, is_strict=False, model_limit_tokens=16)
    made = unshuffled(task(MULTIPLE_CHOICE), [choice("x" * 30, ["one", "two"], 0)], rules)
    question = made.questions[0]
    assert made.num_cut == 2
    assert (question.ids(0).tolist(), question.spans[0]) == ([*b"xxxxxxxxxxxx one"], (13, 16))
    with pytest.raises(DataError, match="does not fit into 2 tokens"):
        unshuffled(task(MULTIPLE_CHOICE), [choice("x" * 30, ["one", "two"], 0)], PromptRules(9, 99, False, 2))


def test_cut_prompts_are_scored_alike_on_both_paths() -> None:
    rules = PromptRules(2048, 20_480, is_strict=False, model_limit_tokens=40)
    shared, plain = (
        score(EchoModel(), EchoTokenizer(), mixed_bundle(), rules=rules, path=path) for path in ("shared", "plain")
    )
    assert decisions(shared) == decisions(plain)
    assert sum(each.made.num_cut for each in shared.tasks) > 20


def test_too_small_limits_are_refused() -> None:
    bundle = bundle_of((task(MULTIPLE_CHOICE, label="ten", shots=10, rows=12), [choice("q", ["a"], 0)] * 12))
    prompts.check_enough_rows(bundle.tasks, 11)
    with pytest.raises(ConfigError, match=r"--limit 3: ten would have 3 rows for 10 shots.*at least 11"):
        prompts.check_enough_rows(bundle.tasks, 3)
