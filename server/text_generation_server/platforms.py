"""The means with which one rank computes: a device and its kernels, the other ranks, recorded steps, moments of the
device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from text_generation_server.device.graphs import DecodeGraphs, Graphs, no_graphs
from text_generation_server.device.transfers import HostMoment, Moment
from text_generation_server.distributed import Group
from text_generation_server.kernels.interface import Kernels


@dataclass(frozen=True, slots=True)
class Platform:
    device: torch.device
    kernels: Kernels
    group: Group
    graphs: Graphs = field(default_factory=no_graphs)
    # Marks the moment when the device has completed all work given to it until now.
    mark: Callable[[], Moment] = HostMoment
    mixed_graphs: DecodeGraphs = field(default_factory=no_graphs)  # for steps with prompt chunks, by number of tokens
    adapter_graphs: Graphs = field(default_factory=no_graphs)  # for decode steps of which a row has an adapter
    wake: Callable[[], None] = lambda: None  # wakes the threads of the kernels, because a step begins

    def clear_graphs(self) -> None:
        self.graphs.clear()
        self.mixed_graphs.clear()
        self.adapter_graphs.clear()
