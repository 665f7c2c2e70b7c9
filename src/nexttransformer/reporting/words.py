"""Texts of pages in English and Chinese, from a JSON file: key -> {"en": text, "zh": text}."""

from pathlib import Path

from nexttransformer import jsonio

LANGUAGES = ("en", "zh")
REPORT_WORDS = Path(__file__).parent / "words.json"


def words_of(language: str, path: Path = REPORT_WORDS) -> dict[str, str]:
    """Returns all texts in a language: "en" or "zh"."""
    return {key: texts[language] for key, texts in jsonio.read_json(path).items()}
