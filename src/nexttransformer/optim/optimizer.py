"""The one optimizer of all methods: Muon sharded by owner, AdamW replicated, state by parameter name.

Gradients arrive averaged over the whole batch in fp32 and equal on all ranks. AdamW is elementwise,
so every rank computes it from the same numbers; Muon is in `sharded_muon`. No state depends on the
world size: a checkpoint holds whole tensors under "<parameter>::<state>" and loads at any other.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nexttransformer.errors import CheckpointError, ConfigError, join_problems
from nexttransformer.optim.adamw import adamw_update
from nexttransformer.optim.groups import ParameterGroup, check_partition
from nexttransformer.optim.muon import second_moment_shape
from nexttransformer.optim.schedule import Rates, scheduled_rates
from nexttransformer.optim.sharded_muon import MOMENTUM, SECOND_MOMENT, ShardedMuon
from nexttransformer.optim.sharding import ROUND_BYTES, assign_to_ranks
from nexttransformer.protocol import Protocol

ADAM_M, ADAM_V = "adam_m", "adam_v"


def state_key(name: str, state: str) -> str:
    """Returns the checkpoint key of one state of one parameter."""
    return f"{name}::{state}"


class Optimizer:
    """Muon and AdamW over the parameter groups of a model.

    Attributes:
        num_updates_done: completed updates; `step` accepts only the update of this index. Set it
            after loading state.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: list[ParameterGroup],
        protocol: Protocol,
        *,
        num_updates: int,
        rank: int = 0,
        world_size: int = 1,
        process_group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        muon_round_bytes: int = ROUND_BYTES,
    ) -> None:
        """Allocates the state that this rank keeps.

        Args:
            parameters: every trained parameter by its public name, fp32, all on one device.
            groups: exact partition of the same names, with at most one Muon group.
            protocol: supplies the schedules.
            num_updates: updates of the whole run.
            rank: this rank, 0 to world_size - 1.
            world_size: number of ranks.
            process_group: group of these ranks; the default group if left out.
            compute_dtype: dtype of Muon's matrix products; bfloat16 on CUDA, float32 elsewhere if left out.
            muon_round_bytes: limit of this rank's fp32 matrices that are updated and sent at a time.

        Raises:
            ConfigError: if the groups do not partition the parameters, two names share one tensor,
                or a parameter is not fp32.
        """
        check_partition(parameters, groups)
        _check_tensors(parameters)
        self._parameters = dict(parameters)
        self._groups = groups
        self._protocol = protocol
        self._num_updates = num_updates
        self._rank, self._world_size = rank, world_size
        self.num_updates_done = 0
        self._applied: Rates | None = None

        # State of this rank by checkpoint key.
        self._state: dict[str, Tensor] = {}
        self._muon: ShardedMuon | None = None
        for group in groups:
            if _is_muon(group):
                assert self._muon is None, "more than one Muon group"
                is_cuda = self._parameters[group.names[0]].is_cuda
                self._muon = ShardedMuon(
                    {name: self._parameters[name] for name in group.names},
                    group.settings,
                    rank=rank,
                    world_size=world_size,
                    process_group=process_group,
                    compute_dtype=compute_dtype or (torch.bfloat16 if is_cuda else torch.float32),
                    round_bytes=muon_round_bytes,
                )
                self._state |= {state_key(*key): tensor for key, tensor in self._muon.state.items()}
            else:
                for name in group.names:
                    for state in (ADAM_M, ADAM_V):
                        self._state[state_key(name, state)] = torch.zeros_like(self._parameters[name].detach())
        self._writers = self._assign_writers()

    @torch.no_grad()
    def step(self, update: int) -> None:
        """Applies one update from the parameters' `.grad`, at the rates scheduled for it.

        Args:
            update: must equal `num_updates_done`.

        Raises:
            ValueError: if it does not.
        """
        if update != self.num_updates_done:
            raise ValueError(f"step({update}): expected {self.num_updates_done}, the number of completed updates.")
        missing = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        assert not missing, f"no gradient: {', '.join(missing)}"
        rates = scheduled_rates(update, self._groups, num_updates=self._num_updates, protocol=self._protocol)
        pairs = list(zip(self._groups, rates.learning_rates, strict=True))

        # Muon first: AdamW needs no exchange and hides the last part of Muon's.
        for group, learning_rate in pairs:
            if _is_muon(group) and self._muon:
                self._muon.start_step(
                    learning_rate=learning_rate, momentum=rates.muon_momentum, weight_decay=rates.muon_weight_decay
                )
        for group, learning_rate in pairs:
            if not _is_muon(group):
                self._step_adamw(group, learning_rate, update)
        if self._muon:
            self._muon.finish_step()
        self._applied = rates
        self.num_updates_done = update + 1

    def _step_adamw(self, group: ParameterGroup, learning_rate: float, update: int) -> None:
        settings = group.settings
        assert settings.betas is not None
        parameters: list[Tensor] = [self._parameters[name] for name in group.names]
        adamw_update(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [self._state[state_key(name, ADAM_M)] for name in group.names],
            [self._state[state_key(name, ADAM_V)] for name in group.names],
            update=update,
            learning_rate=learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def zero_grad(self, *, set_to_none: bool = False) -> None:
        """Clears all gradients.

        Args:
            set_to_none: frees them. By default they are zeroed in place, which keeps them inside
                DDP's buckets while micro-batches accumulate.
        """
        for parameter in self._parameters.values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def applied_rates(self, update: int) -> Rates:
        """Returns the rates with which `step(update)` was made.

        Raises:
            ValueError: if the latest step of this process was not that update.
        """
        if self._applied is None or self._applied.update != update:
            latest = "none" if self._applied is None else self._applied.update
            raise ValueError(f"update {update}: its rates were not applied; the latest applied update is {latest}.")
        return self._applied

    def learning_rates(self, update: int) -> list[float]:
        """Returns the learning rates with which `step(update)` was made, in group order."""
        return list(self.applied_rates(update).learning_rates)

    def expected_state(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Returns shape and dtype of every state of all ranks together, by key."""
        expected = {}
        for group in self._groups:
            for name in group.names:
                shape = tuple(self._parameters[name].shape)
                shapes = {ADAM_M: shape, ADAM_V: shape}
                if _is_muon(group):
                    shapes = {MOMENTUM: shape, SECOND_MOMENT: second_moment_shape(shape)}
                for state, state_shape in shapes.items():
                    expected[state_key(name, state)] = (state_shape, torch.float32)
        return expected

    def writers(self) -> dict[str, int]:
        """Returns the rank that saves the states of each parameter, equal on all ranks."""
        return dict(self._writers)

    def _assign_writers(self) -> dict[str, int]:
        # Muon's owners save what only they have. AdamW's states are spread so that all ranks write
        # about the same number of bytes, counting that rank 0 also writes the weights.
        num_bytes = {name: 4 * parameter.numel() for name, parameter in self._parameters.items()}
        written_bytes = [0] * self._world_size
        written_bytes[0] = sum(num_bytes.values())
        owners = self._muon.owners if self._muon else {}
        for name, owner in owners.items():
            written_bytes[owner] += num_bytes[name]
        adamw_bytes = {name: 2 * size for name, size in num_bytes.items() if name not in owners}
        return {**owners, **assign_to_ranks(adamw_bytes, world_size=self._world_size, initial=written_bytes)}

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns what this rank must write, by key. Over all ranks every key appears exactly once.

        The tensors are the live ones (Muon's are slices of larger storage): write or copy them
        before the next step.
        """
        return {
            key: tensor for key, tensor in self._state.items() if self._writers[key.rsplit("::", 1)[0]] == self._rank
        }

    def state_keys(self) -> list[str]:
        """Returns the keys of the states that this rank keeps, and so must load."""
        return list(self._state)

    @torch.no_grad()
    def load_state_tensor(self, key: str, tensor: Tensor) -> None:
        """Copies one saved state into place; a state that only another rank keeps is checked and ignored.

        Raises:
            CheckpointError: if the key is unknown, or shape or dtype differ.
        """
        expected = self.expected_state().get(key)
        if expected is None:
            raise CheckpointError(f"optimizer state '{key}': unknown here. The checkpoint is of another model.")
        if (tuple(tensor.shape), tensor.dtype) != expected:
            raise CheckpointError(
                f"optimizer state '{key}': got {list(tensor.shape)} {tensor.dtype}, "
                f"expected {list(expected[0])} {expected[1]}."
            )
        if key in self._state:
            self._state[key].copy_(tensor)

    def load_state(self, get: Callable[[str], Tensor]) -> None:
        """Loads all states that this rank keeps. Set `num_updates_done` as well.

        Args:
            get: returns the saved tensor of a key; called once for each key of `state_keys`.
        """
        for key in self.state_keys():
            self.load_state_tensor(key, get(key))


def _is_muon(group: ParameterGroup) -> bool:
    return group.settings.optimizer == "muon"


def _check_tensors(parameters: Mapping[str, nn.Parameter]) -> None:
    problems = []
    first_names: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = first_names.setdefault(id(parameter), name)
        if other != name:
            problems.append(f"parameter '{name}': the same tensor as '{other}', expected one name for each.")
        if parameter.dtype != torch.float32:
            problems.append(f"parameter '{name}': stored as {parameter.dtype}, expected torch.float32.")
    if problems:
        raise ConfigError(join_problems(problems))
