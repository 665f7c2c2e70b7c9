"""Every residual scheme: pinned counts, and the properties each method must prove before training."""

import pytest
import torch

from nexttransformer.config import ModelConfig, method_files, resolve_method
from nexttransformer.models import build_model
from nexttransformer.models.budget import matched_mlp_width, measure_config, reference_budget
from nexttransformer.models.state import map_state
from nexttransformer.protocol import get_protocol
from tests.models.randomize import random_ids, randomize

# method -> (parameters, MLP width under formal-v1, deviation of training FLOPs in percent)
PINNED = {
    "hc": (1_356_235_700, 6144, 0.44),
    "mhc": (1_353_550_818, 6016, -0.07),
    "mhc_lite": (1_355_812_178, 6016, 0.22),
    "simple_hc": (1_358_072_020, 6144, 0.37),
    "attnres_full": (1_355_881_177, 6144, 0.45),
    "attnres_block": (1_355_881_177, 6144, 0.10),
    "mudd": (1_357_607_900, 6144, 0.46),
    "denseformer": (1_355_810_867, 6144, 0.06),
}
METHODS = sorted(PINNED)
# Stay equal to the plain residual with any base weights, not only with zero output projections.
STRONGLY_EQUAL = {"hc", "mudd", "denseformer"}


def config_of(method: str) -> ModelConfig:
    return resolve_method(method_files()[method], "test-v1")


def randomized(method: str):
    model = build_model(config_of(method))
    randomize(model)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_counts_and_budget(method):
    protocol = get_protocol("formal-v1")
    config = resolve_method(method_files()[method], protocol)
    budget, reference = measure_config(config), reference_budget(protocol)
    num_parameters, mlp_width, deviation_percent = PINNED[method]
    assert budget.num_parameters == num_parameters
    assert (config.mlp_width, matched_mlp_width(config, protocol)) == (mlp_width, mlp_width)
    deviation = 100 * (budget.macs_per_token / reference.macs_per_token - 1)
    assert deviation == pytest.approx(deviation_percent, abs=0.0051)


@pytest.mark.parametrize(
    ("method", "num_matmul"),
    [("hc", 701.9), ("mhc", 699.2), ("mhc_lite", 701.5), ("simple_hc", 703.8), ("mudd", 703.3)],
)
def test_matmul_weights(method, num_matmul):
    config = resolve_method(method_files()[method], "formal-v1")
    assert measure_config(config).num_matmul / 1e6 == pytest.approx(num_matmul, abs=0.05)


@pytest.mark.parametrize("method", METHODS)
def test_new_parameters_are_coefficients(method):
    specs = build_model(config_of(method), "meta").parameter_specs()
    assert {spec.tag for name, spec in specs.items() if name.startswith("residual.")} == {"coefficient"}


@pytest.mark.parametrize("method", METHODS)
def test_equal_to_the_plain_residual_at_init(method):
    config = config_of(method)
    model = build_model(config, seed=1)
    plain = build_model(config.model_copy(update={"residual": {"type": "plain"}}), seed=1)
    # The smear is off at the initial weights; switch it on so that x0 differs from the embedding.
    for each in (model, plain):
        each.smear_lambda.data.fill_(0.5)
    ids = random_ids(config)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids), atol=2e-4 if "attnres" in method else 1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_equal_to_the_plain_residual_with_trained_base_weights(method):
    config = config_of(method)
    model = build_model(config, seed=1)
    plain = build_model(config.model_copy(update={"residual": {"type": "plain"}}), seed=1)
    randomize(plain)
    base = {name: value for name, value in plain.state_dict().items() if name in model.state_dict()}
    model.load_state_dict(base, strict=False)
    ids = random_ids(config)
    with torch.no_grad():
        difference = (model(ids) - plain(ids)).abs().max().item()
    if method in STRONGLY_EQUAL:
        assert difference <= 1e-4
    else:
        assert difference > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_causality_batch_independence_and_prefix(method):
    model = randomized(method)
    ids = random_ids(model.config, rows=2)
    with torch.no_grad():
        logits = model(ids)
        for t in (1, 63, 64, 65, 127):
            changed = ids.clone()
            changed[:, t:] = (changed[:, t:] + 7) % model.config.vocab_size
            assert torch.equal(model(changed)[:, :t], logits[:, :t]), t
        torch.testing.assert_close(model(ids[1:]), logits[1:], atol=1e-5, rtol=0)
        for t in (1, 2, 65):
            torch.testing.assert_close(model(ids[:, :t]), logits[:, :t], atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_state_passing(method):
    model = randomized(method)
    ids = random_ids(model.config, rows=2)
    with torch.no_grad():
        whole = model(ids)
        first, state = model.hidden(ids[:, :50], want_state=True)
        # A state of swapped rows continues swapped rows.
        swapped = map_state(lambda tensor: tensor[[1, 0]], state)
        second, _ = model.hidden(ids[[1, 0], 50:], state=swapped)
        halves = model.head_logits(torch.cat([first, second[[1, 0]]], dim=1))
    torch.testing.assert_close(halves, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_every_coefficient_gets_a_gradient_except_the_listed_ones(method):
    model = randomized(method)
    for parameter in model.residual.parameters():
        # Logits of -8 in the stream mixing would leave gradients of a few 1e-4 of the others.
        parameter.data.clamp_(min=-1.0)
    ids = random_ids(model.config, rows=4)
    model(ids[:, :-1], ids[:, 1:]).mean().backward()
    unreached = model.residual.unreached()
    gradients = {name: parameter.grad for name, parameter in model.residual.named_parameters()}
    assert set(unreached) <= set(gradients)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        largest = gradient.abs().max()
        excepted = unreached.get(name, [])
        reached = [row for row in range(gradient.shape[0]) if row not in excepted]
        for row in reached:
            assert gradient[row].abs().max() > 1e-5 * largest, (name, row)
        if gradient.ndim == 2:
            assert (gradient[reached].abs().amax(0) > 1e-5 * largest).all(), name
        # The list is honest: what it names has no gradient beyond the epsilon of the norms.
        if reached:
            assert all(gradient[row].abs().max() < 1e-5 * largest for row in excepted), name


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_stays_near_float32(method):
    exact = randomized(method)
    rounded = build_model(config_of(method), compute_dtype=torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    ids = random_ids(exact.config, rows=2)
    with torch.no_grad():
        losses = [model(ids[:, :-1], ids[:, 1:]).mean().item() for model in (exact, rounded)]
    assert abs(losses[0] - losses[1]) < 0.03


def test_strict_load_names_are_stable():
    names = {
        "hc": {"generator.weight": (6, 64), "read_bias": (4,), "mix_bias": (4, 4), "write_bias": (4,), "scale": (2,)},
        "mhc": {"generator.weight": (24, 256), "bias": (24,), "scale": (3,)},
        "mhc_lite": {"generator.weight": (32, 256), "bias": (32,), "scale": (3,)},
        "simple_hc": {"generator.weight": (8, 256), "bias": (8,), "scale": (2,)},
    }
    for method, parameters in names.items():
        specs = build_model(config_of(method), "meta").parameter_specs()
        residual = {name: spec.shape for name, spec in specs.items() if name.startswith("residual.")}
        expected = {
            f"residual.sublayers.{index}.{name}": shape for index in range(8) for name, shape in parameters.items()
        }
        assert residual == expected, method
    mudd = build_model(config_of("mudd"), "meta").parameter_specs()
    assert mudd["residual.blocks.3.w1.weight"].shape == (5, 64)
    assert mudd["residual.blocks.2.w1.weight"].shape == (16, 64)
    assert mudd["residual.blocks.2.w2.weight"].shape == (16, 16)
    assert mudd["residual.blocks.2.bias"].shape == (16,)
    attnres = build_model(config_of("attnres_full"), "meta").parameter_specs()
    assert attnres["residual.queries"].shape == (8, 64)
    assert "resid_lambdas" not in attnres and "backout_lambda" not in attnres
