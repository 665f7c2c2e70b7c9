"""The committed pages are what the committed records give: anyone can rebuild the leaderboard and compare."""

from pathlib import Path

from nexttransformer.board.render import render_site

ROOT = Path(__file__).parents[2]


def test_committed_pages_equal_rebuilt_ones() -> None:
    rebuilt = render_site(ROOT / "evidence")
    committed = {
        path.relative_to(ROOT / "site").as_posix(): path.read_bytes()
        for path in (ROOT / "site").rglob("*")
        if path.is_file()
    }
    assert sorted(committed) == sorted(map(str, rebuilt)), "run: python -m nexttransformer.leaderboard"
    different = [name for name, content in rebuilt.items() if committed[str(name)] != content]
    assert not different, f"run: python -m nexttransformer.leaderboard ({different[:5]})"
