"""The command line of `train`: every problem together, nothing touched, exit codes (F16, F25)."""

import json
import os
import subprocess
import sys

import pytest

from nexttransformer import train
from nexttransformer.errors import ConfigError
from nexttransformer.training.options import FLAGS, parse_options
from nexttransformer.training.process_place import place_problems, read_place
from tests.training.trainer_runs import CONFIG, arguments


def problems(words: list[str], environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_options(words, environ or {})
    return str(caught.value).splitlines()


def test_the_option_surface_is_frozen():
    # A new option is a new way to deviate: say so in CHANGELOG.md and in the training guide.
    assert sorted(FLAGS) == sorted(
        "--config --site-config --output --micro-batch --formal --smoke-steps --resume --protocol --seed --updates "
        "--eval --save-minutes --stop-minutes --keep-checkpoints --keep-every --no-compile".split()
    )


def test_four_mistakes_are_named_at_once(tmp_path):
    site = tmp_path / "site.json"
    site.write_text(json.dumps({"data_rot": "data"}))
    config = tmp_path / "method.json"
    config.write_text(CONFIG.read_text().replace('"pattern": "F"', '"patern": "F"'))
    words = [
        "--config",
        str(config),
        "--site-config",
        str(site),
        "--output",
        str(tmp_path / "run"),
        "--micro-batch",
        "0",
    ]
    before = os.times()
    command = [sys.executable, "-m", "nexttransformer.train", *words, "--resum", "auto"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ.copy())
    after = os.times()
    assert done.returncode == 2
    # Processor time: a busy machine is slow, not wrong.
    assert after.children_user + after.children_system - before.children_user - before.children_system < 10
    lines = done.stderr.splitlines()
    assert "unknown option --resum. Did you mean '--resume'?" in lines
    assert "--micro-batch 0: expected a whole number from 1 to 512." in lines
    assert any("unknown key 'data_rot'. Did you mean 'data_root'?" in line for line in lines)
    assert any("unknown key 'patern' in 'schedule'. Did you mean 'pattern'?" in line for line in lines)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_flags_that_exclude_each_other(prepared_site, tmp_path):
    formal = arguments(
        prepared_site, tmp_path / "run", "--formal", "--seed", "1", "--updates", "5", "--smoke-steps", "2"
    )
    lines = problems([*formal, "--eval", "none"])
    for flag in ("--smoke-steps", "--seed", "--updates", "--eval"):
        assert f"{flag} cannot be used with --formal, which fixes it. Remove one of them." in lines
    smoke = arguments(prepared_site, tmp_path / "run", "--smoke-steps", "2", "--updates", "5")
    assert problems(smoke) == ["--updates cannot be used with --smoke-steps (open runs only). Remove one of them."]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--updates", "21"], "--updates 21: expected a whole number from 1 to 20."),
        (["--smoke-steps", "x"], "--smoke-steps x: expected a whole number from 1 to 20."),
        (["--keep-checkpoints", "0"], "--keep-checkpoints 0: expected a whole number of at least 1."),
        (["--keep-every", "-1"], "--keep-every -1: expected a whole number of at least 0."),
        (["--save-minutes", "nan"], "--save-minutes nan: expected a number of at least 0."),
        (["--seed", "1.5"], "--seed 1.5: expected a whole number from 0 to 2147483647."),
        (["--eval", "core"], "--eval core: expected bpb,core, bpb or none."),
        (["--resume", "runs/none"], "--resume runs/none: no such checkpoint folder. Expected auto, never or a folder."),
        (["more"], "unexpected argument 'more'."),
    ],
)
def test_bad_values(prepared_site, tmp_path, words, line):
    assert line in problems(arguments(prepared_site, tmp_path / "run", *words))


def test_an_unknown_protocol_has_a_suggestion(prepared_site, tmp_path):
    lines = problems(arguments(prepared_site, tmp_path / "run", "--protocol", "test-v2"))
    assert lines[0] == "--protocol test-v2: unknown protocol. Did you mean 'test-v1'?"


def test_output_must_not_be_a_file(prepared_site, tmp_path):
    (tmp_path / "run").write_text("")
    assert problems(arguments(prepared_site, tmp_path / "run")) == [
        f"--output {tmp_path / 'run'}: is a file, expected a folder."
    ]


def test_missing_flags_and_values():
    assert problems(["--config"]) == [
        "train: argument --config: expected one argument. 'train --help' lists the options."
    ]
    lines = problems(["--protocol", "test-v1"])
    assert lines[:3] == ["--config is missing.", "--output is missing.", "--micro-batch is missing."]


def test_help_names_every_option(capsys):
    assert train.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in FLAGS)


WORKER = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"MASTER_PORT": "80"}, "MASTER_PORT=80: expected a port from 1024 to 65535"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x: expected a port"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE not set although RANK, LOCAL_RANK set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR not set although RANK, WORLD_SIZE, LOCAL_RANK set"),
        ({"RANK": "two"}, "RANK=two: expected a whole number"),
        ({"RANK": "2"}, "RANK=2 contradicts WORLD_SIZE=2"),
        ({"NODE_RANK": "1"}, "NODE_RANK=1 set without NNODES"),
        ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK=2 contradicts NNODES=2"),
        ({"NNODES": "2", "NODE_RANK": "0", "GROUP_RANK": "1"}, "NODE_RANK=0 contradicts GROUP_RANK=1 of the launcher"),
        # Accelerate starts 6 processes where 7 were asked for over 2 machines.
        (
            {"WORLD_SIZE": "6", "NNODES": "2", "NODE_RANK": "0", "GPUS_PER_NODE": "4"},
            "started another number of processes than NNODES x GPUS_PER_NODE = 2 x 4 = 8",
        ),
        (
            {"WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"},
            "WORLD_SIZE=7, expected 2 nodes x 4 processes = 8",
        ),
        (
            {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "", "NNODES": "2"},
            "NNODES=2, but no launcher started this process",
        ),
    ],
)
def test_launcher_variables(changes, text):
    (line,) = place_problems({**WORKER, **changes})
    assert text in line


def test_several_bad_variables_are_listed_together():
    assert len(place_problems({**WORKER, "RANK": "-1", "MASTER_PORT": "7", "NODE_RANK": "0"})) == 3


def test_launcher_variables_of_a_good_job():
    assert place_problems({}) == [] and read_place({}).world_size == 1
    place = read_place({**WORKER, "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "NNODES": "2"})
    assert (place.num_nodes, place.node_rank, place.port) == (2, 0, 29500)


def test_paths_the_system_refuses_join_the_other_problems(prepared_site, tmp_path):
    lines = problems([*arguments(prepared_site, tmp_path / ("x" * 300)), "--seed", "x", "--resume", "\udcff"])
    assert any("File name too long" in line for line in lines)
    assert any(line.startswith("--seed x: ") for line in lines)
    assert "'\\udcff': not text in UTF-8. Rename that path." in lines
