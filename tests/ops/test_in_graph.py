"""Every function with a gradient of its own is marked, and marked functions become no graph module of their own."""

import ast
from pathlib import Path

import torch

import nexttransformer
from nexttransformer.ops.in_graph import prepare_compiler
from nexttransformer.ops.norm import rms_norm, squared_norm


def calls_outside_marked_functions(tree: ast.Module) -> list[int]:
    """Returns the lines outside marked functions where an `autograd.Function` of this file is applied."""
    classes = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("autograd.Function" in ast.unparse(base) for base in node.bases)
    }
    marked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(each) == "in_graph" for each in node.decorator_list)
    ]
    allowed = {inner for node in marked for inner in ast.walk(node)}
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "apply"
        and ast.unparse(node.func.value) in classes
        and node not in allowed
    ]


def test_all_are_marked() -> None:
    found, num_classes = {}, 0
    for path in Path(nexttransformer.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        num_classes += text.count("(torch.autograd.Function)")
        if lines := calls_outside_marked_functions(ast.parse(text)):
            found[path.name] = lines
    assert found == {} and num_classes >= 4


def test_a_call_that_is_not_marked_is_found() -> None:
    text = "class F(torch.autograd.Function): pass\ndef f(x):\n    return F.apply(x)\n"
    text += "@in_graph\ndef g(x): return F.apply(x)"
    assert calls_outside_marked_functions(ast.parse(text)) == [3]


def test_no_graph_module_in_the_graph() -> None:
    prepare_compiler()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(lambda x: rms_norm(x) * squared_norm(x)[..., None], backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), rms_norm(x) * squared_norm(x)[..., None])
    (graph,) = graphs
    assert [node.target for node in graph.graph.nodes if node.op == "get_attr"] == []


def test_graphs_with_marked_functions_may_be_kept_on_disk() -> None:
    prepare_compiler()
    from torch._inductor import config

    keys = {name: key for name, key in config.unsafe_marked_cacheable_functions.items() if "nexttransformer" in name}
    assert "nexttransformer.ops.norm._rms_norm" in keys and all(len(key) == 64 for key in keys.values())
