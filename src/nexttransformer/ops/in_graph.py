"""Functions with a gradient of their own, and how the compiler takes them.

Left alone Dynamo traces an `autograd.Function` into a graph module inside the graph. Torch 2.11 can then lose the
gradients of all graphs before one that DDP cuts, silently: where the function converts its result to the type that it
has already (2.13 does not). So these functions go into the graph as they are, traced with everything else.
"""

import hashlib
import inspect
from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., torch.Tensor])
_functions: list[Callable[..., torch.Tensor]] = []


def in_graph(function: Function) -> Function:
    """Marks a function that applies an `autograd.Function` to its arguments and does nothing else."""
    _functions.append(function)
    return function


def prepare_compiler() -> None:
    """Tells the compiler about the marked functions; call it before anything is compiled (it imports the compiler).

    Graphs with functions that torch does not know would not be kept in its cache on disk; a digest of their source
    tells entries of different versions apart.
    """
    from torch._inductor import config

    known = dict(config.unsafe_marked_cacheable_functions)
    for function in _functions:
        torch.compiler.allow_in_graph(function)
        source = inspect.getsource(inspect.getmodule(function) or function)
        known[f"{function.__module__}.{function.__name__}"] = hashlib.sha256(source.encode()).hexdigest()
    config.unsafe_marked_cacheable_functions = known
