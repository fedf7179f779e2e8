"""What a device and the links between devices can do. Values only; the numbers' sources stand in the JSON files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.sim.catalog import load


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A link between two devices. bandwidth: bytes/s in one direction; efficiency: the share reached by large
    messages; latency_s: a message of no size, with its synchronisation."""

    name: str
    bandwidth: float
    efficiency: float
    latency_s: float

    def seconds(self, num_bytes: float) -> float:
        """Time of one message."""
        return self.latency_s + num_bytes / (self.bandwidth * self.efficiency)

    def all_reduce_seconds(self, num_bytes: float, num_devices: int) -> float:
        """A ring all-reduce: every device sends and receives 2 (n-1)/n of the message; two synchronisations."""
        if num_devices == 1:
            return 0.0
        moved = 2 * (num_devices - 1) / num_devices * num_bytes
        return 2 * self.latency_s + moved / (self.bandwidth * self.efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """A device. flops: dense bf16 FLOP/s by the datasheet; memory in bytes and bytes/s; launch_s: CPU time to launch
    one kernel; step_overhead_s: CPU time around one step of a worker; tile: rows and columns of a product's output that
    one of the `num_sms` multiprocessors computes at a time."""

    name: str
    flops: float
    memory_bytes: float
    memory_bandwidth: float
    memory_efficiency: float
    num_sms: int
    tile: int
    launch_s: float
    step_overhead_s: float
    reserved_bytes: float
    link: LinkSpec

    def occupancy(self, rows: int, columns: int) -> float:
        """Share of the multiprocessors that work, on average, while a rows x columns product is computed tile by tile:
        small products fill only a part of the device, and the last wave of tiles is seldom full."""
        tiles = -(-rows // self.tile) * -(-columns // self.tile)
        waves = -(-tiles // self.num_sms)
        return tiles / (waves * self.num_sms)

    def matmul_seconds(self, rows: int, inner: int, columns: int, efficiency: float, value_bytes: int = 2) -> float:
        """Time of a [rows, inner] x [inner, columns] product: compute or memory, whichever takes longer (roofline).
        efficiency: share of `flops` that a product reaches which fills the device."""
        compute = 2.0 * rows * inner * columns / (self.flops * efficiency * self.occupancy(rows, columns))
        return max(compute, self.memory_seconds(value_bytes * (rows * inner + inner * columns + rows * columns)))

    def memory_seconds(self, num_bytes: float) -> float:
        return num_bytes / (self.memory_bandwidth * self.memory_efficiency)


def load_hardware(name: str) -> HardwareSpec:
    """Raises catalog.UnknownName, which lists the known devices."""
    fields: dict[str, Any] = dict(load("hardware", name))
    del fields["source"]
    return HardwareSpec(link=LinkSpec(**fields.pop("link")), **fields)
