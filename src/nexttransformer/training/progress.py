"""What a person sees of a run: the header before update 1, one line of progress, the price of a stop."""

import os
import sys
import time
from typing import TextIO

from rich.console import Console
from rich.status import Status

from nexttransformer.models.budget import Budget
from nexttransformer.optim.groups import ParameterGroup
from nexttransformer.training.distributed import World
from nexttransformer.training.metrics import MetricsLine
from nexttransformer.training.metrics_math import Throughput, show_duration
from nexttransformer.training.options import TrainOptions
from nexttransformer.training.shares import MicroBatchPlan, rank_rows

STOP_LEAD_VARIABLE = "NEXTTRANSFORMER_STOP_LEAD_SECONDS"
_PLAIN_SECONDS = 20.0
_ETA_UPDATES = 10
_STOP_COST_UPDATES = 20


def run_header(
    options: TrainOptions,
    world: World,
    plan: MicroBatchPlan,
    budget: Budget,
    groups: list[ParameterGroup],
    *,
    epochs: float,
    backend: str,
) -> str:
    """Returns the derived numbers of a run, one subject a line."""
    protocol, config = options.protocol, options.config
    rows = rank_rows(world.world_size, protocol.global_batch_rows)
    shown_rows = f"{rows[0]}" if len(set(rows)) == 1 else f"{min(rows)} to {max(rows)}"
    members = ", ".join(f"{group.settings.name} {group.num_parameters:,}" for group in groups)
    kind = {"formal": "formal", "smoke": "smoke (never formal)", "open": "open"}[options.mode]
    tokens = options.last_update * protocol.tokens_per_update
    schedules = "" if options.num_updates == options.last_update else f" (schedules of {options.num_updates:,})"
    lines = [
        f"run         {config.method} ({config.family}), {protocol.id}, {kind}, seed {options.seed}",
        f"nodes       {world.num_nodes}, world size {world.world_size}, device {world.device.type}, {backend}",
        f"batch       {protocol.global_batch_rows} rows x {protocol.context_tokens} = {protocol.tokens_per_update:,} "
        f"tokens per update; {shown_rows} rows per rank = {plan.num_micro_batches} x micro-batch {plan.micro_batch}"
        + (f" ({plan.num_padded} padded on rank {world.rank})" if plan.num_padded else ""),
        f"length      {options.last_update:,} updates{schedules}, {tokens:,} tokens, {epochs:.2f} epochs of the data",
        f"parameters  {budget.num_parameters:,}: {members}",
        f"compute     {budget.training_flops_per_token:,.0f} FLOPs/token causal-exact "
        f"({budget.nominal_flops_per_token:,.0f} nominal), {budget.training_flops_per_token * tokens:.3g} FLOPs in all",
    ]
    return "\n".join(lines)


class ProgressLine:
    """One line of progress: updated in place on a terminal, printed every 20 seconds elsewhere. Rank 0 only."""

    def __init__(
        self, throughput: Throughput, *, last_update: int, is_main: bool, stream: TextIO | None = None
    ) -> None:
        """Shows nothing yet; `last_update` is where the run ends."""
        self._throughput, self._last_update, self._is_main = throughput, last_update, is_main
        self.console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._told = 0.0
        self._num_updates = 0
        self._seconds: list[float] = []
        self._bpb: float | None = None

    def say(self, text: str) -> None:
        """Prints whole lines."""
        if self._is_main:
            self.console.print(text, markup=False)

    def evaluated(self, bpb: float | None) -> None:
        """Notes the latest BPB for the line."""
        self._bpb = bpb if bpb is not None else self._bpb

    def update(self, line: MetricsLine) -> None:
        """Shows a completed update."""
        self._num_updates += 1
        self._seconds = [*self._seconds[-49:], line.seconds]
        if not self._is_main:
            return
        if self._num_updates == _ETA_UPDATES:
            self.say(self._plan_text(line.update, line.tokens / self._median()))
        text = self._text(line)
        if self.console.is_terminal:
            status = self._status or self.console.status(text, spinner="dots")
            status.start()
            status.update(text)
            self._status = status
        elif time.monotonic() - self._told > _PLAIN_SECONDS or line.update == self._last_update:
            self._told = time.monotonic()
            self.say(text)

    def pause(self) -> None:
        """Takes the line away while something else prints."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def tell_stop_cost(self, save_seconds: float, minutes_since_save: float) -> None:
        """Says what a stop and a kill cost, compared with the lead that the batch file asks for.

        Args:
            save_seconds: duration of the last save.
            minutes_since_save: work that a kill would lose now.
        """
        cost = self._median() + save_seconds
        text = f"a stop takes {cost:.1f} s (one update and a save)"
        lead = os.environ.get(STOP_LEAD_VARIABLE, "")
        if lead.isdigit():
            enough = "enough" if cost < int(lead) else "TOO SHORT: raise it, or work is lost"
            text += f", the batch file gives {lead} s: {enough}"
        if minutes_since_save > 0:
            text += f"; a kill now costs {show_duration(60 * minutes_since_save)} of work"
        self.say(text)

    @property
    def is_stop_cost_due(self) -> bool:
        """Whether enough updates are timed to say what a stop costs."""
        return self._num_updates == _STOP_COST_UPDATES

    def _median(self) -> float:
        return sorted(self._seconds)[len(self._seconds) // 2]

    def _remaining_seconds(self, update: int) -> float:
        return (self._last_update - update) * self._median()

    def _plan_text(self, update: int, tokens_per_second: float) -> str:
        seconds = self._remaining_seconds(update)
        devices = self._throughput.world_size
        unit = "GPU hours" if self._throughput.peak else "process hours"
        return (
            f"speed {tokens_per_second:,.0f} tokens/s; to go: {show_duration(seconds)}, "
            f"{seconds * devices / 3600:,.1f} {unit}, without evaluations and saves"
        )

    def _text(self, line: MetricsLine) -> str:
        parts = [
            f"update {line.update:,}/{self._last_update:,}",
            f"loss {line.loss_nats:.4f}",
            f"grad norm {line.gradient_norm:.3g}",
            f"lr {line.learning_rates[0]:.3g}",
            f"{line.tokens_per_second:,.0f} tokens/s",
        ]
        nominal = self._throughput.nominal_mfu(line.tokens_per_second)
        if line.mfu_fraction is not None and nominal is not None:
            parts.append(f"MFU {100 * line.mfu_fraction:.1f} % causal-exact, {100 * nominal:.1f} % nominal")
        if self._bpb is not None:
            parts.append(f"BPB {self._bpb:.4f}")
        parts.append(f"{show_duration(self._remaining_seconds(line.update))} left")
        return " | ".join(parts)
