"""The second device is a device: of what it would find, none can hide on it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sim
import torch


def on(device, *shape):
    return torch.randn(*shape).to(device)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the memory is mapped once")
def test_the_host_cannot_read_memory_of_the_device():
    body = (
        "import ctypes, sim, torch\n"
        "sim.load()\n"
        "x = torch.ones(3, device='sim')\n"
        "print(ctypes.string_at(x.data_ptr(), 4))\n"
    )
    folder = Path(__file__).parent
    ended = subprocess.run([sys.executable, "-c", body], cwd=folder, capture_output=True)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    assert ended.stdout == b""


def test_fresh_memory_holds_nan():
    x = torch.ones(100, device="sim")
    del x
    assert torch.empty(100, device="sim").isnan().all()


def test_blocks_are_counted_until_nobody_holds_them():
    with sim.counted() as counts:
        x = torch.ones(3, device="sim")
        view = x[1:]
    assert counts.blocks == 1
    with sim.counted() as counts:
        del x
        held = [view]
        del view, held
    assert counts.blocks == -1


# ---- what is an error ----------------------------------------------------------------------------

READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x[0, 0] > 0),
    "if": lambda x: 1 if (x > 0).any() else 0,
    "tolist": lambda x: x.tolist(),
    "repr": repr,
    "numpy": lambda x: x.cpu().numpy(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": torch.nonzero,
    "unique": torch.unique,
    "mask": lambda x: x[x > 0],
    "masked write": lambda x: x.index_put_((x > 0,), x[0, 0]),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "synchronize": lambda x: torch.accelerator.synchronize(),
    "event": lambda x: torch.Stream("sim").record_event().synchronize(),
    "stream": lambda x: torch.Stream("sim").synchronize(),
    "to the host": lambda x: x.to("cpu"),
    "number to the device": lambda x: torch.tensor(1.0, device="sim"),
}


@pytest.mark.parametrize("name", READS)
def test_where_the_host_would_wait_is_an_error_and_counted(name):
    x = on("sim", 3, 4)
    with sim.counted() as counts:
        READS[name](x.clone())
    assert counts.reads + counts.to_host + counts.waits > 0
    with sim.waiting(refused=True), pytest.raises(RuntimeError, match="the host waits"):
        READS[name](x)


def test_what_waits_for_nothing_is_no_error():
    x = on("sim", 3, 4)
    with sim.waiting(refused=True), sim.counted() as counts:
        torch.full((), 1.0, device="sim") + x * torch.tensor(2.0)
        torch.where(x > 0, x, 0.0).masked_fill_(x > 1, 2.0).half().sum(0)[1:].clone()
        x.to("sim:1")
        torch.ones(3).to("sim", non_blocking=True)
        torch.randn(3, device="sim")
        torch.repeat_interleave(torch.arange(3).to("sim", non_blocking=True), output_size=3)
    assert counts.reads == counts.to_host == counts.waits == 0
    assert (counts.to_device, counts.between, counts.copies) == (2, 1, 3)


@pytest.mark.parametrize(
    "call",
    [
        torch.add,
        torch.mm,
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: torch._foreach_add([a], [b]),
    ],
    ids=["add", "mm", "where", "foreach"],
)
@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_tensors_of_two_devices_in_one_operator_are_an_error(call, other):
    a, b = torch.ones(2, 2, device="sim"), torch.ones(2, 2, device=other)
    call(a, b.to("sim"))
    with pytest.raises(RuntimeError, match=other):
        call(a, b)


# ---- kernels -------------------------------------------------------------------------------------


def test_a_list_of_tensors_is_one_launch_and_a_view_is_none():
    tensors = [torch.ones(3, device="sim") for _ in range(5)]
    with sim.launched() as names:
        torch._foreach_mul_([t[1:] for t in tensors], 2.0)
    assert names == ["aten::_foreach_mul_"]


def test_without_a_compiler_the_reason_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(sim, "CACHE", tmp_path)
    assert sim.why_not() is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "C++ compiler" in sim.why_not()
