"""Numbers sent to another device, without a wait."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(number: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a few numbers on a device. The host does not wait for one that it sends; for one that
    it gets it must.
    """
    return number.to(device, dtype, non_blocking=number.is_cpu)


def send_once(
    numbers: tuple[Any, ...], device: torch.device, cache: dict[tuple[Any, ...], Tensor]
) -> Tensor:
    """Return whole numbers as a tensor on a device, which `cache` keeps. A graph cannot be captured
    while they are sent, and needs them at a fixed address.
    """
    if (numbers, device) in cache:
        return cache[numbers, device]
    tensor = to_device(torch.tensor(numbers, device="cpu"), device)
    if type(tensor) is Tensor:  # a fake one has no values for the next step
        cache[numbers, device] = tensor
    return tensor
