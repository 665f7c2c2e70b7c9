"""Colours against WCAG: text 4.5 to 1 on every background it stands on, curves 3 to 1."""

import re

import pytest

from nexttransformer.reporting.page import TEMPLATES

STYLE = (TEMPLATES / "base.css").read_text(encoding="utf-8")


def palette(theme: str) -> dict[str, str]:
    block = STYLE.split(":root[data-theme" if theme == "dark" else ":root {")[1].split("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_formula():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(theme: str):
    colours = palette(theme)
    pairs = [(text, back, 4.5) for text in ("text", "soft", "accent") for back in ("page", "card", "faint")]
    pairs += [(tone, f"{tone}-soft", 4.5) for tone in ("good", "bad", "warn", "accent")]
    pairs += [("good", "card", 4.5), ("text", "warn-soft", 4.5), ("text", "bad-soft", 4.5)]
    pairs += [(f"c{index}", "card", 3.0) for index in range(8)]
    low = {
        (a, b): round(contrast(colours[a], colours[b]), 2)
        for a, b, least in pairs
        if contrast(colours[a], colours[b]) < least
    }
    assert low == {}
