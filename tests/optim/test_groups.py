"""The partition of parameters into groups."""

import dataclasses
from dataclasses import dataclass

import pytest

from nexttransformer.errors import ConfigError
from nexttransformer.optim.groups import ParameterGroup, check_partition, partition_parameters
from nexttransformer.protocol import FORMAL_V1


@dataclass(frozen=True)
class Spec:
    shape: tuple[int, ...]
    tag: str
    units: int = 1


def dense_full_specs() -> dict[str, Spec]:
    """Names, shapes and tags of dense_full, written from the tensor table of base_model.md, section 1."""
    width, vocab, layers = 1536, 32_768, 23
    specs = {
        "transformer.wte.weight": Spec((vocab, width), "embedding"),
        "lm_head.weight": Spec((vocab, width), "head"),
        "resid_lambdas": Spec((layers,), "lambda"),
        "x0_lambdas": Spec((layers,), "x0_lambda"),
        "smear_gate.weight": Spec((1, 24), "smear_backout"),
        "smear_lambda": Spec((1,), "smear_backout"),
        "backout_lambda": Spec((1,), "smear_backout"),
    }
    for layer in range(layers):
        block = f"transformer.h.{layer}"
        for projection in ("c_q", "c_k", "c_v", "c_proj"):
            specs[f"{block}.attn.{projection}.weight"] = Spec((width, width), "matrix")
        specs[f"{block}.mlp.c_fc.weight"] = Spec((4 * width, width), "matrix")
        specs[f"{block}.mlp.c_proj.weight"] = Spec((width, 4 * width), "matrix")
        if layer % 2 == 0:
            specs[f"{block}.attn.ve_gate.weight"] = Spec((12, 12), "matrix_parity")
            specs[f"value_embeds.{layer}.weight"] = Spec((vocab, width), "value_embedding")
    return specs


def test_groups_of_dense_full():
    specs = dense_full_specs()
    groups = partition_parameters(specs, FORMAL_V1)
    # Tensors and elements: base_model.md, section 5.1.
    assert [(group.settings.name, len(group.names), group.num_parameters) for group in groups] == [
        ("matrix", 150, 651_167_424),
        ("head", 1, 50_331_648),
        ("embedding", 1, 50_331_648),
        ("value_embedding", 12, 603_979_776),
        ("lambda", 1, 23),
        ("x0_lambda", 1, 23),
        ("smear_backout", 3, 26),
    ]
    assert sum(group.num_parameters for group in groups) == 1_355_810_568
    names = [name for group in groups for name in group.names]
    assert sorted(names) == sorted(specs) and len(names) == len(set(names)) == 169


def test_group_values_of_the_formal_protocol():
    # lr, (beta1, beta2), decay: base_model.md, section 5.1.
    expected = {
        "matrix": (0.0282842712, None, 0.0106439787),
        "head": (0.008, (0.8, 0.96), 0.01),
        "embedding": (0.3, (0.8, 0.995), 0.001),
        "value_embedding": (0.15, (0.8, 0.995), 0.01),
        "lambda": (0.00707106781, (0.8, 0.95), 0.05),
        "x0_lambda": (0.707106781, (0.96, 0.95), 0.0),
        "smear_backout": (0.2, (0.8, 0.95), 0.0),
        "small": (0.002, (0.8, 0.95), 0.0),
        "coefficient": (0.002, (0.8, 0.95), 0.0),
    }
    assert {settings.name for settings in FORMAL_V1.groups} == set(expected)
    for settings in FORMAL_V1.groups:
        learning_rate, betas, decay = expected[settings.name]
        assert settings.learning_rate == pytest.approx(learning_rate, rel=1e-8)
        assert settings.betas == betas
        assert settings.weight_decay == pytest.approx(decay, rel=5e-9)
        assert settings.eps == 1e-10
        assert settings.second_beta == (0.9 if settings.name == "matrix" else None)


def test_new_tags_and_stacks_have_groups():
    specs = {
        "experts": Spec((8, 128, 256), "matrix", units=8),
        "down": Spec((64, 1536), "low_rank"),
        "kernel": Spec((1536, 1, 4), "small"),
        "scale": Spec((), "coefficient"),
    }
    groups = partition_parameters(specs, FORMAL_V1)
    assert [group.names for group in groups] == [("experts", "down"), ("kernel",), ("scale",)]


def test_all_problems_are_reported_together():
    head, small = FORMAL_V1.groups[1], FORMAL_V1.groups[-2]
    greedy = dataclasses.replace(small, tags=("small", "head"))
    protocol = dataclasses.replace(FORMAL_V1, groups=(FORMAL_V1.groups[0], head, greedy))
    specs = {
        "good": Spec((8, 8), "matrix"),
        "misspelt": Spec((8, 8), "matrx"),
        "tagless": Spec((8, 8), ""),
        "twice": Spec((8, 8), "head"),
        "vector": Spec((8,), "matrix"),
        "kernel": Spec((8, 1, 4), "matrix"),
    }
    with pytest.raises(ConfigError) as error:
        partition_parameters(specs, protocol)
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    assert "'misspelt': unknown optimizer tag 'matrx'. Did you mean 'matrix'?" in lines[0]
    assert "'tagless': no optimizer tag" in lines[1]
    assert "'twice': in more than one group (head, small)" in lines[2]
    assert "'vector': shape [8]" in lines[3]
    assert "'kernel': shape [8, 1, 4]" in lines[4]


def test_names_digest_identifies_the_members():
    settings = FORMAL_V1.groups[0]
    group = ParameterGroup(settings, ("b", "a"), 2)
    assert group.names_digest == ParameterGroup(settings, ("a", "b"), 2).names_digest
    # printf '["a","b"]' | sha256sum
    assert group.names_digest == "0473ef2dc0d324ab659d3580c1134e9d812035905c4781fdd6d529b0c6860e13"
    assert group.names_digest != ParameterGroup(settings, ("a", "c"), 2).names_digest


def test_groups_must_cover_the_model_exactly():
    settings = FORMAL_V1.groups[0]
    groups = [ParameterGroup(settings, ("a", "b"), 2), ParameterGroup(settings, ("b", "ghost"), 2)]
    with pytest.raises(ConfigError) as error:
        check_partition(["a", "b", "c"], groups)
    assert str(error.value).splitlines() == [
        "parameter 'c': in no optimizer group.",
        "parameter 'ghost': in a group, but not in the model.",
        "parameter 'b': in 2 groups.",
    ]
