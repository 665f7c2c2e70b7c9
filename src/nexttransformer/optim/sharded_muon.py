"""Muon over many ranks: each unit is updated once, by its owner, and sent to everybody.

The owner alone keeps a unit's state. A rank's units are worked off in rounds of bounded size; the
new fp32 matrices of a round form one flat buffer per owner, exchanged by one all-gather, which
runs while the next round is computed. Nothing waits for the GPU on the host.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nexttransformer.optim.muon import muon_update, second_moment_shape
from nexttransformer.optim.sharding import Stack, assign_to_ranks, muon_cost, plan_rounds
from nexttransformer.protocol import GroupSettings

MOMENTUM, SECOND_MOMENT = "momentum", "second_moment"


class ShardedMuon:
    """Muon for a set of matrices.

    Attributes:
        owners: rank that updates each parameter and keeps its state.
        state: (parameter, state name) -> tensor of the parameter's own units, for this rank's parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: GroupSettings,
        *,
        rank: int,
        world_size: int,
        process_group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype,
        round_bytes: int,
    ) -> None:
        """Allocates the state of this rank's matrices.

        Args:
            parameters: fp32 [m, n] or [E, m, n] by name, all on one device.
            settings: the Muon group.
            rank: this rank.
            world_size: number of ranks.
            process_group: group of these ranks; None for the default group.
            compute_dtype: dtype of the matrix products.
            round_bytes: limit of this rank's fp32 bytes in a round.
        """
        self._parameters = dict(parameters)
        self._settings = settings
        self._rank, self._world_size, self._process_group = rank, world_size, process_group
        self._compute_dtype = compute_dtype
        self._device = next(iter(parameters.values())).device
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        costs = {name: muon_cost(shape) for name, shape in shapes.items()}
        self.owners = assign_to_ranks(costs, world_size=world_size)
        self._rounds = plan_rounds(shapes, self.owners, world_size=world_size, round_bytes=round_bytes)
        # The state of a stack is one tensor; what a checkpoint sees are its parameters' shares.
        self._stack_state: dict[Stack, tuple[Tensor, Tensor]] = {}
        self.state: dict[tuple[str, str], Tensor] = {}
        for stacks in self._rounds:
            for stack in stacks[rank]:
                self._allocate(stack, shapes)
        self._pending: tuple[int, Tensor, dist.Work | None] | None = None

    def _allocate(self, stack: Stack, shapes: Mapping[str, tuple[int, ...]]) -> None:
        momentum_EMN = torch.zeros(stack.shape, device=self._device)
        second_moments = torch.zeros(second_moment_shape(stack.shape), device=self._device)
        self._stack_state[stack] = (momentum_EMN, second_moments)
        for name, share in zip(stack.names, momentum_EMN.split(stack.num_units), strict=True):
            self.state[name, MOMENTUM] = share.view(shapes[name])
        for name, share in zip(stack.names, second_moments.split(stack.num_units), strict=True):
            self.state[name, SECOND_MOMENT] = share.view(second_moment_shape(shapes[name]))

    @torch.no_grad()
    def start_step(self, *, learning_rate: float, momentum: float, weight_decay: float) -> None:
        """Updates this rank's matrices from their `.grad`; `finish_step` must follow.

        Args:
            learning_rate: scheduled rate of the group.
            momentum: scheduled momentum.
            weight_decay: scheduled weight decay.
        """
        for index in range(len(self._rounds)):
            buffer = self._compute(index, learning_rate, momentum, weight_decay)
            work = self._exchange(buffer)
            self.finish_step()
            self._pending = (index, buffer, work)

    @torch.no_grad()
    def finish_step(self) -> None:
        """Waits for the round that is still on its way and copies its matrices into the parameters."""
        if self._pending is None:
            return
        index, buffer, work = self._pending
        if work is not None:
            work.wait()
        for rank, stacks in enumerate(self._rounds[index]):
            for stack, weights_EMN in _stack_views(stacks, buffer[rank]):
                for name, weight in zip(stack.names, weights_EMN.split(stack.num_units), strict=True):
                    parameter = self._parameters[name]
                    parameter.copy_(weight.view(parameter.shape))
        self._pending = None

    def _compute(self, index: int, learning_rate: float, momentum: float, weight_decay: float) -> Tensor:
        """Returns fp32 [world size, longest share of a rank] with this rank's new matrices in its row."""
        settings = self._settings
        assert settings.second_beta is not None
        stacks_of_rank = self._rounds[index]
        longest = max(sum(stack.num_elements for stack in stacks) for stacks in stacks_of_rank)
        buffer = torch.empty(self._world_size, longest, device=self._device)
        for stack, weights_EMN in _stack_views(stacks_of_rank[self._rank], buffer[self._rank]):
            members = [self._parameters[name] for name in stack.names]
            unit_shape = (-1, stack.num_rows, stack.num_columns)
            torch.cat([parameter.view(unit_shape) for parameter in members], out=weights_EMN)
            gradients_EMN = torch.cat([_gradient(parameter).reshape(unit_shape) for parameter in members])
            momentum_EMN, second_moments = self._stack_state[stack]
            muon_update(
                weights_EMN,
                gradients_EMN,
                momentum_EMN,
                second_moments,
                learning_rate=learning_rate,
                momentum=momentum,
                weight_decay=weight_decay,
                second_beta=settings.second_beta,
                eps=settings.eps,
                compute_dtype=self._compute_dtype,
            )
        return buffer

    def _exchange(self, buffer: Tensor) -> dist.Work | None:
        """Starts to fill every row of the buffer with its rank's matrices; None if there is one rank."""
        if self._world_size == 1:
            return None
        # The own row is sent from where the result stands.
        return dist.all_gather_into_tensor(
            buffer.view(-1), buffer[self._rank], group=self._process_group, async_op=True
        )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _stack_views(stacks: list[Stack], row: Tensor) -> Iterator[tuple[Stack, Tensor]]:
    """Cuts one rank's row of a round's buffer into its stacks, [E, M, N] each."""
    start = 0
    for stack in stacks:
        yield stack, row[start : start + stack.num_elements].view(stack.shape)
        start += stack.num_elements
