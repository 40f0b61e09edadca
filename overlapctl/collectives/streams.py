"""The group's own streams, and the flags by which they signal the peers'.

Order is kept by events within the rank and by flags between ranks. Every call starts behind what
the caller's stream holds, and behind the group's previous call; it ends with one event, behind a
gate word that is open unless the watchdog has closed it.
"""

from __future__ import annotations

import os
from typing import Any

from overlapctl.collectives.control import Control
from overlapctl.collectives.driver import Driver
from overlapctl.collectives.schedule import Flag, Schedule, flag_slot, word_value

__all__ = ["Flags", "Lanes", "connections_problem"]


def connections_problem() -> str | None:
    """Why stream waits must not be used in this process; ``None``: they may.

    With one hardware queue a stream that waits for a flag stops every other stream of the process
    (measured on H200), so that the wait may never end.
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "").strip() == "1":
        return "CUDA_DEVICE_MAX_CONNECTIONS=1 lets a waiting stream block all others"
    return None


class Lanes:
    """Streams by the names that schedules give them, created when first asked for."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._streams: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._streams:
            self._streams[name] = self._driver.create_stream()
        return self._streams[name]

    def join(self, into: str, names: list[str]) -> None:
        """Let one lane wait for what others hold now."""
        for name in names:
            if name != into:
                self._driver.wait_event(self[into], self._driver.record(self[name]))

    def close(self) -> None:
        """Destroy the streams; what is enqueued still completes."""
        for stream in self._streams.values():
            self._driver.destroy_stream(stream)
        self._streams.clear()


class Flags:
    """The flag words between this rank and its peers, and how far each has counted.

    Parameters
    ----------
    driver, control
        The GPU and the shared file that holds the words.
    device_address
        The file's address for the GPU.
    """

    def __init__(self, driver: Driver, control: Control, device_address: int) -> None:
        self._driver, self._control = driver, control
        self._device_address = device_address
        self._bases: dict[Flag, int] = {}

    def advance(self, schedule: Schedule) -> dict[Flag, int]:
        """Count a call that is being issued; return the bases its values are added to."""
        rank = self._control.rank
        before = {}
        for flag, steps in schedule.advances.items():
            if rank in (flag.source, flag.target) and flag.source != flag.target:
                before[flag] = self._bases.get(flag, 0)
                self._bases[flag] = word_value(before[flag], steps)
        return before

    def signal(self, flag: Flag, word: int, stream: Any) -> None:
        """Enqueue writing a word of a peer."""
        self._driver.write_flag(self._address(flag), word, stream)

    def wait(self, flag: Flag, word: int, stream: Any) -> None:
        """Enqueue waiting for a word of this rank."""
        self._driver.wait_flag(self._address(flag), word, stream)

    def wait_gate(self, call: int, stream: Any) -> None:
        """Enqueue waiting for the gate to let a call end."""
        self._driver.wait_flag(
            self._device_address + self._control.gate_offset, call % (1 << 32), stream
        )

    def word(self, flag: Flag) -> int:
        """Read a word from the host."""
        return self._control.flag(flag.target, flag_slot(flag, self._control.world))

    def release(self) -> None:
        """Write, from the host, every word that a stream of this rank may be waiting for."""
        for flag, word in list(self._bases.items()):
            if flag.target == self._control.rank:
                self._control.set_flag(flag.target, flag_slot(flag, self._control.world), word)

    def _address(self, flag: Flag) -> int:
        slot = flag_slot(flag, self._control.world)
        return self._device_address + self._control.flag_offset(flag.target, slot)
