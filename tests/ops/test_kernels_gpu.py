"""Real kernels on a GPU: every path at the shapes in use, the policy end to end, and one compiled graph."""

import pytest
import torch

from nexttransformer.config import method_files, resolve_method
from nexttransformer.models import build_model
from nexttransformer.ops import backends, fla_core, self_check
from nexttransformer.ops.path_check import check_path, failure
from nexttransformer.ops.probes import Sizes, get_probe, probe_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1800),
]
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def clean_slate():
    backends.forget_choices()
    yield
    if fla_core.is_guard_bypassed():
        fla_core.set_guard_bypassed(False)
    backends.forget_choices()


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize(("op", "path"), [(op, path) for op in probe_names() for path in get_probe(op).entry_points])
def test_every_path(op, path, head_dim):
    entry_point = get_probe(op).entry_points[path]
    guard = "bypassed" if entry_point is not None and backends.ENTRY_POINTS[entry_point] else "none"
    sizes = Sizes(1536 // head_dim, head_dim, head_dim, 2048, 6144, 32_768)
    check = check_path(op, path, sizes, device=DEVICE, guard=guard)
    assert check.passed, failure(check)


@pytest.mark.parametrize("method", ["gdn_hybrid", "kda_hybrid"])
def test_checked_model_compiles_to_one_graph_and_matches_the_reference(method):
    config = resolve_method(method_files()[method], "proxy-v1").model_copy(update={"num_layers": 4})
    config = config.model_copy(update={"layers": config.layers[:4]})
    verdict = self_check.check_kernels(config, mode="open", device=DEVICE)
    assert verdict["passed"], verdict["choices"]
    model = build_model(config, DEVICE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    generator = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(0, config.vocab_size, (2, 2, 500), generator=generator).to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    losses, gradients = [], []
    for run in (compiled, model):
        model.zero_grad()
        loss = run(ids, targets).mean()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    for op in ("gated_delta_rule", "kimi_delta_attention"):
        backends.choose(backends.Choice(op, "reference", "test"))
    model.zero_grad()
    loss = model(ids, targets).mean()
    loss.backward()
    assert loss.item() == pytest.approx(losses[0], abs=5e-3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        difference = (gradients[0][name] - parameter.grad).norm() / parameter.grad.norm().clamp_min(1e-12)
        assert difference.item() < 0.1, name
