"""The whole bundle: prompt digests of all 22 tasks, and the echo model's decisions."""

import hashlib

import pytest

from nexttransformer.evaluation import prompts
from tests.evaluation.core_inputs import full_bundle, needs_bundle, score
from tests.evaluation.echo import EchoModel, EchoTokenizer

pytestmark = needs_bundle

# label: first 16 digits of the prompts' digest, echo model's correct rows at limit 50 and on all rows.
EXPECTED = {
    "hellaswag_zeroshot": ("1403200999c67114", 15, 3047),
    "jeopardy": ("761987c1a46d7da5", 0, 0),
    "bigbench_qa_wikidata": ("c59dc06619c46f36", 4, 334),
    "arc_easy": ("3ad3860aba4ef7bd", 13, 678),
    "arc_challenge": ("45adc8e7dc5bd847", 11, 271),
    "copa": ("4c65e42e050a3192", 28, 58),
    "commonsense_qa": ("879afe3ca8123677", 15, 337),
    "piqa": ("cf52b431eb5a48ab", 25, 1014),
    "openbook_qa": ("5df1e6189ebca93d", 14, 117),
    "lambada_openai": ("fe8235a15b74ff6e", 4, 307),
    "hellaswag": ("0d6920ad9316db02", 15, 2949),
    "winograd": ("1f9f799300f302d6", 24, 136),
    "winogrande": ("0718819fe4009b98", 22, 619),
    "bigbench_dyck_languages": ("30a79dcec17f4238", 0, 0),
    "agi_eval_lsat_ar": ("05485b22c72f950a", 10, 59),
    "bigbench_cs_algorithms": ("a84b968a3b14cc05", 15, 490),
    "bigbench_operators": ("6af579c29a16f455", 2, 14),
    "bigbench_repeat_copy_logic": ("02de535b4e3c965a", 0, 0),
    "squad": ("255e1438cd6c5982", 1, 22),
    "coqa": ("2366122f1b541ed5", 0, 161),
    "boolq": ("01b135da96027f65", 30, 1740),
    "bigbench_language_identification": ("6fe6aa65e469605f", 10, 2557),
}
ALL_TASKS = "ef5350fc8638061a27ff2af3b8b3c9ecc288c7cc3f0e8607b4554569862b66eb"


def test_prompts_of_all_rows_are_the_published_ones() -> None:
    bundle = full_bundle()
    found, num_prompts, combined = {}, 0, hashlib.sha256()
    for task in bundle.tasks:
        rows = prompts.evaluation_rows(bundle.rows[task.file])
        digest = hashlib.sha256()
        for index in range(len(rows)):
            texts = prompts.prompts(task, rows, index)
            num_prompts += len(texts)
            for text in texts:
                digest.update(text.encode("utf-8") + b"\0")
        combined.update(digest.digest())
        found[task.label] = digest.hexdigest()[:16]
    assert found == {label: expected[0] for label, expected in EXPECTED.items()}
    assert (num_prompts, sum(task.num_rows for task in bundle.tasks)) == (253_240, 91_037)
    assert combined.hexdigest() == ALL_TASKS


@pytest.mark.parametrize("path", ["shared", "plain"])
def test_echo_model_at_limit_50(path: str) -> None:
    result = score(EchoModel(), EchoTokenizer(), full_bundle(), limit=50, path=path)
    assert {each.task.label: each.num_correct for each in result.tasks} == {k: v[1] for k, v in EXPECTED.items()}
    assert result.core_limited == pytest.approx(0.037225, abs=5e-7)
    assert (result.core_v1, result.core_v2) == (None, None)
    mean_v2 = sum(each.centered(each.task.baseline_v2) or 0.0 for each in result.tasks) / 22
    assert mean_v2 == pytest.approx(0.012190, abs=5e-7)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_echo_model_on_all_rows() -> None:
    result = score(EchoModel(), EchoTokenizer(), full_bundle(), batch_tokens=65_536)
    assert {each.task.label: each.num_correct for each in result.tasks} == {k: v[2] for k, v in EXPECTED.items()}
    assert result.core_v1 == pytest.approx(0.046307, abs=5e-7)
    assert result.core_v2 == pytest.approx(0.021613, abs=5e-7)
