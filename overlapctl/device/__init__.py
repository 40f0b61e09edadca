"""What the GPU is: the first stage, ``device -> DeviceFacts -> plan``.

:func:`open_device` is the one entry. It gives a :class:`Device`, real or simulated, which tells
facts, topology, clocks and versions.
"""

from __future__ import annotations

import re

from overlapctl.device.protocol import Device
from overlapctl.errors import DeviceError

__all__ = ["Device", "open_device"]

FALLBACK = "sim:h200"


def open_device(spec: str | None = None) -> Device:
    """Open a GPU, or simulate one.

    Parameters
    ----------
    spec
        ``"cuda:1"``: the GPU with that index among those visible to the process.
        ``"cuda"``: torch's current device, or the first if torch does not use CUDA yet.
        ``"sim:h200"``: a model of the catalogue, with variants as in
        ``"sim:h200,sms=100,link=50,world=8,nccl=2.29.7"``.
        ``None``: the first GPU if there is one, else the simulated H200. Ask ``is_simulated``
        before treating what it says as a fact about this machine.

    Raises
    ------
    DeviceError
        If there is no driver, no such GPU or no such model; the message names the remedy.
    """
    if spec is None:
        return _first_or_simulated()
    text = spec.strip()
    if text.startswith("sim:"):
        from overlapctl.device.simulated import parse_simulated

        return parse_simulated(text)
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", text, re.ASCII)
    if match is None:
        raise DeviceError(
            f"device {spec!r} is unknown", remedy='use "cuda:0", or "sim:h200" to simulate one'
        )
    from overlapctl.device.real import RealDevice, current_index

    return RealDevice(current_index() if match[1] is None else int(match[1]))


def _first_or_simulated() -> Device:
    from overlapctl.device.real import RealDevice

    try:
        return RealDevice(0)
    except DeviceError:
        from overlapctl.device.simulated import parse_simulated

        return parse_simulated(FALLBACK)
