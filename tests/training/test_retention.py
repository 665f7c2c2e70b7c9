import shutil
from pathlib import Path

import pytest

from nexttransformer.errors import CheckpointError, ConfigError, RunFailure
from nexttransformer.training.checkpoint_choice import choose_checkpoint
from nexttransformer.training.checkpoint_files import list_checkpoints
from nexttransformer.training.collectives import SingleProcess
from nexttransformer.training.retention import Retention, apply_retention, check_space
from tests.training.run_helpers import RUN_ID, make_record, make_state, save


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def crowded_folder(root: Path) -> None:
    for update in (999, 1000, 10_000, 10_005):
        save(root, update)
    (root / "checkpoint_00010005" / "complete.json").unlink()
    shutil.copytree(root / "checkpoint_00000999", root / "checkpoint_9000")
    shutil.copytree(root / "checkpoint_00000999", root / "handpicked")


def test_names_are_compared_as_integers_and_anything_else_is_ignored(tmp_path: Path) -> None:
    """F07."""
    crowded_folder(tmp_path)
    assert [update for update, _ in list_checkpoints(tmp_path)] == [10_005, 10_000, 1000, 999]
    choice = choose_checkpoint(tmp_path, make_record(), "auto", SingleProcess())
    assert choice.update == 10_000
    assert [skipped.path.name for skipped in choice.skipped] == ["checkpoint_00010005"]


def test_retention_removes_only_the_right_ones(tmp_path: Path) -> None:
    """F07."""
    crowded_folder(tmp_path)
    save(tmp_path, 500, state=make_state(500, run_id="f" * 16))
    removed = apply_retention(tmp_path, RUN_ID, Retention(keep=2), newest=10_000)
    assert [path.name for path in removed] == ["checkpoint_00000999"]
    assert names(tmp_path) == [
        "checkpoint_00000500",
        "checkpoint_00001000",
        "checkpoint_00010000",
        "checkpoint_00010005",
        "checkpoint_9000",
        "handpicked",
    ]
    removed = apply_retention(tmp_path, RUN_ID, Retention(keep=1), newest=10_000)
    assert [path.name for path in removed] == ["checkpoint_00001000"]


def test_keep_every_keeps_more_and_0_keeps_none_extra(tmp_path: Path) -> None:
    for update in (5, 10, 15, 20):
        save(tmp_path, update)
    apply_retention(tmp_path, RUN_ID, Retention(keep=1, keep_every=10), newest=20)
    assert names(tmp_path) == ["checkpoint_00000010", "checkpoint_00000020"]
    apply_retention(tmp_path, RUN_ID, Retention(keep=1, keep_every=0), newest=20)
    assert names(tmp_path) == ["checkpoint_00000020"]


def test_nothing_is_removed_unless_the_newest_is_complete(tmp_path: Path) -> None:
    for update in (5, 10, 15):
        save(tmp_path, update)
    (tmp_path / "checkpoint_00000015" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="checkpoint_00000015 is not complete; nothing older is removed"):
        apply_retention(tmp_path, RUN_ID, Retention(keep=1), newest=15)
    assert len(names(tmp_path)) == 3


def test_a_half_removed_checkpoint_is_removed_next_time(tmp_path: Path) -> None:
    for update in (5, 10, 15):
        save(tmp_path, update)
    (tmp_path / "checkpoint_00000005" / "complete.json").unlink()
    (tmp_path / "checkpoint_00000005" / "model.safetensors").unlink()
    removed = apply_retention(tmp_path, RUN_ID, Retention(keep=2), newest=15)
    assert [path.name for path in removed] == ["checkpoint_00000005"]


def test_a_lost_lock_stops_removal(tmp_path: Path) -> None:
    for update in (5, 10):
        save(tmp_path, update)

    def lost() -> None:
        raise RunFailure("lost")

    with pytest.raises(RunFailure, match="lost"):
        apply_retention(tmp_path, RUN_ID, Retention(keep=1), newest=10, check_lock=lost)
    assert len(names(tmp_path)) == 2


def test_bad_retention_is_refused() -> None:
    with pytest.raises(ConfigError, match="--keep-checkpoints 0: expected a whole number from 1"):
        Retention(keep=0)
    with pytest.raises(ConfigError, match="--keep-every -1"):
        Retention(keep_every=-1)


@pytest.mark.parametrize(
    ("present", "saves_due", "num_needed"), [(0, 9, 3), (1, 9, 2), (2, 9, 1), (3, 9, 1), (0, 1, 1), (2, 0, 0)]
)
def test_space_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: int, saves_due: int, num_needed: int
) -> None:
    """F13: (kept + 1 - complete ones, or the saves still due if fewer) x size."""
    for index in range(present):
        save(tmp_path, 5 * (index + 1))
    usage = shutil.disk_usage(tmp_path)
    size = 1000

    def check(free: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
        check_space(tmp_path / ".", RUN_ID, Retention(keep=2), checkpoint_bytes=size, saves_due=saves_due)

    check(num_needed * size)
    if num_needed:
        with pytest.raises(CheckpointError, match=f"needed {num_needed * size:,} bytes, free .* bytes on /"):
            check(num_needed * size - 1)
