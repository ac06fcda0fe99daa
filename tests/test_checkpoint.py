"""A state as a plain dict and as a file: round trips bit for bit, one clear error for what does not
fit, old or new after any kill.
"""

import contextlib
import errno
import functools
import itertools
import os
import pathlib
import pickle
import re
import signal
import stat
import struct
import sys
import warnings
import zipfile
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree
from helpers import Untouched, batch, clone, job, same_bits, shares_memory, tensors
from hypothesis import assume, given
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import purescale as ps
from purescale.testing import assert_sync_free

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse",
    "ignore:The PyTorch API of nested tensors",
    "ignore:Validating sparse tensor invariants",  # torch 2.14
)
RULE = ps.DynamicScale(init_scale=2.0**10, growth_interval=2)
ADAMW = ps.from_torch(torch.optim.AdamW, lr=0.01)


class Mine(NamedTuple):
    ema: Any
    count: Any


def zeros(tree):
    """Another tree of the same structure."""
    return pytree.tree_map(
        lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def train_state(steps=0):
    state, step = job(ADAMW, RULE)
    for index in range(steps):
        state, _ = step(state, [batch(index)])
    return state, step


# ---- any tree of purescale and of users

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]


@st.composite
def leaves(draw):
    shape = draw(st.sampled_from([(), (0,), (2,), (2, 3), (0, 4), (2, 1, 3)]))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    leaf = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)[
        ..., : dtype.itemsize
    ].contiguous()
    leaf = (leaf > 127).reshape(shape) if dtype is torch.bool else leaf.view(dtype).reshape(shape)
    kinds = ["dense", "view", "expanded", "permuted", "conj", "parameter", "sparse"]
    kind = draw(st.sampled_from(kinds))
    if kind == "view":
        return torch.stack([leaf, leaf])[1]
    if kind == "expanded":
        return leaf.expand(2, *shape)
    if kind == "permuted":
        return leaf.movedim(0, -1) if shape else leaf
    if kind == "conj" and dtype.is_complex:
        return leaf.conj()
    if kind == "parameter" and (dtype.is_floating_point or dtype.is_complex):
        return torch.nn.Parameter(leaf)
    if kind == "sparse" and dtype in (torch.float32, torch.complex64) and shape:
        return torch.sparse_coo_tensor(
            torch.tensor([[1, 0, 1]]), torch.stack([torch.ones_like(leaf)] * 3), (3, *shape)
        )
    return leaf


tensor_of_values = leaves().filter(lambda leaf: leaf.layout is torch.strided and leaf.numel())

trees = st.recursive(
    st.none() | leaves(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.sampled_from(["weight", "0.bias", "", "ä b", "tree", 0, 1]), inner, max_size=3
        )
        | st.builds(Mine, inner, inner)
    ),
    max_leaves=6,
)


def check_restored(restored, tree, *others):
    assert same_bits(restored, tree)
    assert not any(shares_memory(restored, other) for other in others)
    parts = tensors(restored)
    assert all(type(leaf) is torch.Tensor and not leaf.requires_grad for leaf in parts)
    assert not any(shares_memory(a, b) for a, b in itertools.combinations(parts, 2))


@given(trees)
def test_a_tree_comes_back_from_dict_and_file_bit_for_bit_in_fresh_memory(tmp_path_factory, tree):
    path, like = tmp_path_factory.getbasetemp() / "tree.pt", zeros(tree)
    with Untouched((tree, like)):
        d = ps.to_state_dict(tree)
        check_restored(ps.from_state_dict(d, like), tree, d, like, tree)
        ps.save(path, tree)
        check_restored(ps.load(path, like), tree, like, tree)
    assert same_bits(d, ps.to_state_dict(tree))
    for keys, leaf in pytree.tree_flatten_with_path(d)[0]:
        assert isinstance(leaf, torch.Tensor)
        assert all(type(entry) is pytree.MappingKey and type(entry.key) is str for entry in keys)


def test_a_person_can_read_the_keys():
    params = {"fc.weight": torch.ones(1)}
    momentum = ps.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
    d = ps.to_state_dict(
        ps.init_train_state(params, {}, momentum, RULE)._replace(rng=[params, None])
    )
    counters = ["growth_tracker", "hysteresis_tracker", "consecutive_skips"]
    assert pytree.tree_map(lambda leaf: tuple(leaf.shape), d) == {
        "purescale_version": (),
        "tree": {
            "params": {"fc.weight": (1,)},
            "opt_state": {"applied": (), "slots": {"momentum_buffer": {"fc.weight": (1,)}}},
            "scaler": {"scale": (), **dict.fromkeys(counters, ())},
            "step": (),
            "rng": {"0": {"fc.weight": (1,)}},
        },
    }


def test_the_dict_is_a_view_of_the_tree_and_reads_no_value():
    state, _ = train_state(steps=1)
    with Untouched(state):
        d = assert_sync_free(ps.to_state_dict, state)
    d["tree"]["params"]["0.weight"].zero_()
    assert not state.params["0.weight"].any()
    assert not any(
        leaf.requires_grad
        for leaf in tensors(ps.to_state_dict(list(torch.nn.Linear(1, 1).parameters())))
    )


def test_the_version_stays_on_the_cpu_whatever_the_default_device():
    with torch.device("meta"):
        d = ps.to_state_dict(())
    assert d["purescale_version"].device == torch.device("cpu")
    assert ps.from_state_dict(d, like=()) == ()


def test_what_stands_in_other_containers_or_another_order_is_found_by_its_name():
    a, b = torch.tensor([1.0, 2.0])
    restored = ps.from_state_dict(ps.to_state_dict({"b": b, "a": a}), like={"a": a, "b": b})
    assert list(restored.items()) == [("a", a), ("b", b)]
    assert ps.from_state_dict(ps.to_state_dict([a, b]), like=(b, a)) == (a, b)
    assert ps.from_state_dict(ps.to_state_dict({"count": a, "ema": b}), like=Mine(a, b)) == Mine(
        ema=b, count=a
    )


def test_leaves_that_shared_memory_do_not_after_loading_so_that_all_may_be_donated(tmp_path):
    tied = torch.ones(3)
    tree = {"a": tied, "b": tied, "c": tied[:2]}
    torch.save(ps.to_state_dict(tree), tmp_path / "torchs.pt")  # in which leaves share memory
    check_restored(ps.load(tmp_path / "torchs.pt", like=tree), tree, tree)
    tree["bits"] = tied.view(torch.int32)  # torch.save refuses one memory in two dtypes
    ps.save(tmp_path / "ours.pt", tree)
    check_restored(ps.load(tmp_path / "ours.pt", like=tree), tree, tree)


def test_one_member_of_an_ensemble_is_saved_without_the_others(tmp_path):
    ensemble = torch.randn(100, 1000)
    tree = {
        "member": ensemble[7],
        "column": ensemble[:, 0],
        "expanded": ensemble[:1].expand(3, 1000),
    }
    ps.save(tmp_path / "member.pt", tree)
    assert os.path.getsize(tmp_path / "member.pt") < 4 * 1000 * 6
    assert same_bits(ps.load(tmp_path / "member.pt", zeros(tree)), tree)


@pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)
def test_what_distributed_checkpoint_wrote_can_be_made_a_file_for_load(tmp_path):
    state, _ = train_state(steps=1)
    dcp.save(ps.to_state_dict(state), checkpoint_id=tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    assert same_bits(ps.load(tmp_path / "state.pt", zeros(state)), state)


# ---- what does not fit


def changed(d, path, value):
    """A copy of `d` with `value` at `path`; without it where `value` is `...`."""
    *outer, last = path
    copied = pytree.tree_map(lambda leaf: leaf, d)
    node = functools.reduce(lambda node, key: node[key], outer, copied)
    node[last] = value
    if value is ...:
        del node[last]
    return copied


VERSION, SCALE = ["purescale_version"], ["tree", "scaler", "scale"]
BIAS = ["tree", "params", "1.bias"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["tree", "scaler"], ..., r"missing: d\['tree'\]\['scaler'\]\. "),
        (["tree", "rng"], torch.zeros(16), r"not in like: d\['tree'\]\['rng'\]\. .*init_train"),
        (["tree", "step"], torch.tensor([3]), r"\['step'\] is .*64 \(1,\), expected .*64 \(\)\. "),
        (SCALE, torch.tensor(1.0).double(), r"is torch\.float64 \(\), expected torch\.float32"),
        (SCALE, 65536.0, r"\['scale'\] is float, expected torch\.float32 \(\)"),
        (["tree", "scaler"], torch.ones(4), r"is .* \(4,\), expected a dict of 'scale', 'growth"),
        (BIAS, torch.zeros(4).to_sparse(), r"\(4,\) torch\.sparse_coo, expected .* \(4,\)\. "),
        (BIAS, torch.zeros(4, device="meta"), r"is .* \(4,\) without values, on meta, expected"),
        (["tree", 0], torch.ones(1), r"not in like: d\['tree'\]\[0\]\. "),
        (VERSION, ..., r"d is not a state dict of purescale: it is a dict of 'tree', expected 'p"),
        (VERSION, torch.tensor(1.0), "d is not a state dict of purescale"),
        (VERSION, torch.tensor(2), r"_version'\] is 2, this purescale reads version 1.*newe"),
    ],
)
def test_what_differs_is_one_error_with_its_path(path, value, message):
    state, _ = train_state()
    d = changed(ps.to_state_dict(state), path, value)
    with Untouched(state), pytest.raises(ValueError, match=message):
        ps.from_state_dict(d, like=state)


def test_all_differences_are_in_one_error_and_of_each_kind_twenty_are_listed():
    a, b, c = (torch.ones(n) for n in (1, 2, 3))
    many = {str(index): a for index in range(30)}
    d = ps.to_state_dict({"a": a, "b": b, "c": {"x": c, "y": a}})
    like = {"b": c, "c": {"x": c.int(), "z": a}, "e": many}
    like = {**like, **{f"f{name}": leaf for name, leaf in many.items()}}
    with pytest.raises(ValueError, match="d does not match like") as caught:
        ps.from_state_dict(d, like)
    for part in (
        "missing: d['tree']['c']['z'], d['tree']['e'], d['tree']['f0'],",
        "d['tree']['f17'] and 12 more;",
        "not in like: d['tree']['c']['y'], d['tree']['a'].",
        "different: d['tree']['b'] is torch.float32 (2,), expected torch.float32 (3,), d['tree']",
        "['c']['x'] is torch.float32 (3,), expected torch.int32 (3,);",
    ):
        assert part in str(caught.value)


def nested_tensor():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


JUNK = [
    *(None, "65536.0", 10**4000, float("nan"), True, b"\x80", 1j, [torch.ones(2)], {"tree": None}),
    *(torch.ones(7, 7), torch.ones((), dtype=torch.int16), torch.ones(2).to_sparse(), set()),
    *(torch.ones(2, device="meta"), nested_tensor()),
]
junk = st.sampled_from(JUNK)
SMALL = {
    "state": ps.init_train_state({"w": torch.ones(2), "b": torch.ones(())}, {}, ADAMW, RULE),
    "list": [torch.ones(3), None],
}
SOUND = ps.to_state_dict(SMALL)


def identity(d):
    leaves, structure = pytree.tree_flatten(d)
    return structure, [id(leaf) for leaf in leaves]


def nodes(d, path=()):
    yield path
    if isinstance(d, dict):
        for key, child in d.items():
            yield from nodes(child, (*path, key))


@st.composite
def damaged(draw):
    """SMALL's dict with one to three things wrong."""
    d = SOUND
    for _ in range(draw(st.integers(1, 3))):
        *outer, last = draw(st.sampled_from([path for path in nodes(d) if path]))
        what = draw(st.sampled_from(["drop", "replace", "add"]))
        if what == "add":
            last = draw(st.sampled_from(["extra", 0, None, (1, "a")]))
        d = changed(d, [*outer, last], ... if what == "drop" else draw(junk))
        if not d:
            break
    assume(identity(d) != identity(SOUND))  # what was added may have been dropped again
    return d


def check_refused(call):
    with Untouched(SMALL), pytest.raises(ValueError, match=r"Likely cause.*Fix") as caught:
        call()
    assert len(str(caught.value)) < 3000  # and so without any repr of what was found


@given(damaged())
def test_a_damaged_dict_is_always_the_clear_error(d):
    check_refused(lambda: ps.from_state_dict(d, like=SMALL))


ONE, TWICE = torch.ones(1), "has the name of another leaf"


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"epoch": 3}, TypeError, r"tree\['epoch'\] is int; a checkpoint holds.*torch\.tensor"),
        ([nested_tensor()], TypeError, r"tree\[0\] is a nested tensor"),
        ([torch.ones(2, 2).to_mkldnn()], TypeError, r"tree\[0\] is .*mkldnn.*to_dense"),
        ({0: ONE, "0": ONE}, ValueError, rf"tree\['0'\] {TWICE}, '0'.*Fix: ren"),
        ({0: {"a": ONE}, "0": ONE}, ValueError, TWICE),
    ],
)
def test_a_tree_that_no_checkpoint_can_hold_is_refused(tree, error, message, tmp_path):
    with pytest.raises(error, match=message):
        ps.to_state_dict(tree)
    with pytest.raises(error, match=message):
        ps.save(tmp_path / "tree.pt", tree)
    assert not os.listdir(tmp_path)
    with pytest.raises(error, match=message.replace("tree", "like")):
        ps.from_state_dict(ps.to_state_dict(()), like=tree)


# ---- files that are none


class Trap:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.victim),)


def test_no_code_in_a_file_is_run(tmp_path):
    victim = tmp_path / "victim"
    d = ps.to_state_dict(SMALL)
    trapped = [
        Trap(victim),
        {**d, "more": Trap(victim)},
        changed(d, ["tree", "state", "step"], Trap(victim)),
    ]
    for value, zipped in itertools.product(trapped, [True, False]):
        torch.save(value, tmp_path / "trap.pt", _use_new_zipfile_serialization=zipped)
        check_refused(lambda: ps.load(tmp_path / "trap.pt", like=SMALL))
        (tmp_path / "trap.pt").write_bytes(pickle.dumps(value))
        check_refused(lambda: ps.load(tmp_path / "trap.pt", like=SMALL))
        assert not victim.exists()
    pickle.loads((tmp_path / "trap.pt").read_bytes())
    assert victim.exists()  # the trap works


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"loss,accuracy\n1,2\n", b"\x80\x04.", b"PK\x03\x04", os.urandom(1000)]
)
def test_a_file_that_is_no_checkpoint_is_the_clear_error(content, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.pt' is not a file that purescale\.save .*cause.*Fix"):
        ps.load(tmp_path / "x.pt", like=SMALL)


def test_the_state_dict_of_something_else_is_the_clear_error(tmp_path):
    net = torch.nn.Linear(2, 2)
    peers = [net, torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cpu")]
    for other in (*(peer.state_dict() for peer in peers), torch.ones(1), [1, 2]):
        torch.save(other, tmp_path / "x.pt")
        with pytest.raises(ValueError, match=r"load\('.*x\.pt'\) is not a state dict of purescale"):
            ps.load(tmp_path / "x.pt", like=SMALL)


@given(st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_off_is_the_clear_error(tmp_path_factory, share):
    path = tmp_path_factory.getbasetemp() / "cut.pt"
    ps.save(path, SMALL)
    os.truncate(path, int(os.path.getsize(path) * share))
    check_refused(lambda: ps.load(path, like=SMALL))


# ---- files that are damaged


def flipped(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def check_flips(path, tree, bits):
    """Each of these bits turned over is the clear error, or changes no bit of what is loaded, as
    one of the padding, or one that no reader reads.
    """
    words = r"load: .* is (damaged|not a file that purescale\.save wrote).*Likely cause.*Fix"
    for bit in bits:
        flipped(path, bit)
        message = None
        try:
            assert same_bits(ps.load(path, like=zeros(tree)), tree)
        except ValueError as error:
            message = str(error)
        assert message is None or re.match(words, message)
        flipped(path, bit)


@pytest.mark.slow
def test_a_flip_in_any_byte_of_a_file_is_the_clear_error_or_changes_nothing(tmp_path):
    path, tree = tmp_path / "x.pt", {"a": torch.tensor([1.0, 2.0])}
    ps.save(path, tree)
    check_flips(path, tree, range(0, 8 * os.path.getsize(path), 9))


def test_a_flip_in_what_the_directory_has_of_a_leaf_is_the_clear_error_or_changes_nothing(tmp_path):
    """Two readers look at it, and the one that compares checksums is not the one that reads."""
    path, tree = tmp_path / "x.pt", {"a": torch.arange(300.0), "b": torch.arange(33)}
    ps.save(path, tree)
    archive, content = zipfile.ZipFile(path), path.read_bytes()
    first, second = [content.index(name, archive.start_dir) for name in (b"data/1", b"data/2")]
    start, stop = 8 * (first - 54), 8 * (second - 54)  # 46 bytes, then "archive/data/1"
    attributes = range(start + 8 * 38, start + 8 * 42)  # which say that it is a directory
    check_flips(path, tree, [*range(start, stop, 7), *attributes])


def records(path):
    """The start and the size of each tensor's bytes in the file."""
    content = path.read_bytes()
    for info in zipfile.ZipFile(path).infolist():
        if "/data/" in info.filename and info.file_size:
            name, extra = struct.unpack_from("<HH", content, info.header_offset + 26)
            yield info.header_offset + 30 + name + extra, info.file_size


@given(st.data())
def test_a_bit_flipped_in_the_bytes_of_a_leaf_is_found(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "leaf.pt"
    tree = [data.draw(tensor_of_values) for _ in range(3)]
    ps.save(path, tree)
    start, size = data.draw(st.sampled_from(list(records(path))))
    flipped(path, data.draw(st.integers(8 * start, 8 * (start + size) - 1)))
    with pytest.raises(ValueError, match=r"^load: .*leaf.pt' is damaged: .*Likely cause.*Fix"):
        ps.load(path, like=tree)


def test_a_warning_of_torch_that_is_an_error_here_is_told_as_torch_tells_it(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    ps.save(path, torch.ones(1))
    monkeypatch.setattr(torch, "load", lambda *_, **__: warnings.warn("slow", stacklevel=2))
    with pytest.raises(UserWarning, match=r"^slow$"):
        ps.load(path, like=torch.ones(1))


def test_a_file_is_one_of_torch(tmp_path):
    path = tmp_path / "x.pt"
    ps.save(path, SMALL)
    for mmap in (False, True):
        assert same_bits(torch.load(path, weights_only=True, mmap=mmap), ps.to_state_dict(SMALL))


def test_a_file_without_checksums_loads(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        ps.save(tmp_path / "x.pt", SMALL)
    finally:
        torch.serialization.set_crc32_options(before)
    assert same_bits(ps.load(tmp_path / "x.pt", like=zeros(SMALL)), SMALL)


# ---- what a file can hold


class Mark(torch.Tensor):
    pass


def fake():
    with torch._subclasses.FakeTensorMode():
        return torch.ones(2)


@contextlib.contextmanager
def stays(path):
    """There is a file, which is the same afterwards, and nothing beside it."""
    ps.save(path, SMALL)
    yield
    assert os.listdir(path.parent) == [path.name]
    assert same_bits(ps.load(path, zeros(SMALL)), SMALL)


@pytest.mark.parametrize(
    "leaf", [torch.ones(2).as_subclass(Mark), fake(), torch.ones(2, device="meta")], ids=str
)
def test_what_load_could_not_read_is_refused_and_the_old_file_kept(leaf, tmp_path):
    words = r"^tree\['x'\] is .*; a file holds plain tensors.*Fix: "
    with stays(tmp_path / "x.pt"), pytest.raises(TypeError, match=words):
        ps.save(tmp_path / "x.pt", {"x": leaf})


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_inside_a_transform_there_is_nothing_to_save(transform, tmp_path):
    def body(x):
        ps.save(tmp_path / "x.pt", {"x": x})
        return x.sum()

    with pytest.raises(RuntimeError):
        transform(body)(torch.ones(2))
    assert not os.listdir(tmp_path)


FLOAT8 = [value for name, value in vars(torch).items() if name.startswith("float8_")]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "dtype", [*FLOAT8, torch.complex32, torch.uint16, torch.uint32, torch.uint64]
)
def test_rare_dtypes_come_back_from_dict_and_file(dtype, tmp_path):
    source = torch.arange(32, dtype=torch.uint8).view(dtype)
    tree = [source, torch.stack([source, source])[1], source[:0], source[1]]
    like = [torch.empty_like(leaf) for leaf in tree]
    ps.save(tmp_path / "x.pt", tree)
    assert same_bits(ps.load(tmp_path / "x.pt", like), tree)
    assert same_bits(ps.from_state_dict(ps.to_state_dict(tree), like), tree)


def test_a_state_made_in_inference_mode_comes_back_fit_for_training(tmp_path):
    with torch.inference_mode():
        state, step = train_state()
        ps.save(tmp_path / "x.pt", state)
    d = ps.to_state_dict(state)
    for restored in (ps.load(tmp_path / "x.pt", state), ps.from_state_dict(d, state)):
        assert same_bits(restored, state)
        assert not any(leaf.is_inference() for leaf in tensors(restored))
    step(restored, [batch(0)], donate=True)


# ---- where it is written


def test_any_path_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    for make in (str, pathlib.Path, os.fsencode, os.path.relpath):
        ps.save(make(tmp_path / "[1] ä.pt"), SMALL)
        assert same_bits(ps.load(make(tmp_path / "[1] ä.pt"), SMALL), SMALL)
        assert os.listdir(tmp_path) == ["[1] ä.pt"]


def test_a_path_that_cannot_be_is_refused(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="missing"):
        ps.save(tmp_path / "missing" / "x.pt", SMALL)
    os.mkfifo(tmp_path / "fifo")  # stands for a device, which a rename would replace
    monkeypatch.chdir(tmp_path)
    names = "new/", "new/.", "", ".", b"new/"  # of directories that may not be there
    for path in (tmp_path, tmp_path / "fifo", *names):
        with pytest.raises(ValueError, match=r"is a directory or a device; expected the name.*Fix"):
            ps.save(path, SMALL)
    for call in (
        lambda: ps.save(3, SMALL),
        lambda: ps.load(3, SMALL),
        lambda: ps.save(SMALL, tmp_path / "x.pt"),  # torch's order
        lambda: ps.load(SMALL, tmp_path / "x.pt"),
    ):
        with pytest.raises(TypeError, match=r"path is (int|dict).* Fix: `.*`, the path first\.$"):
            call()
    with pytest.raises(FileNotFoundError, match=r"x\.pt"):
        ps.load(tmp_path / "x.pt", SMALL)
    assert os.listdir(tmp_path) == ["fifo"]
    assert not os.path.isfile(tmp_path / "fifo")


@pytest.mark.parametrize("mode", [0o600, 0o444])
def test_a_file_that_is_replaced_hands_on_its_permissions_before_there_is_anything_to_read(
    mode, tmp_path, monkeypatch
):
    path, modes, torch_save = tmp_path / "x.pt", [], torch.save
    ps.save(path, SMALL)
    path.chmod(mode)

    def recorded(d, file):
        modes.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        torch_save(d, file)

    monkeypatch.setattr(torch, "save", recorded)
    ps.save(path, SMALL)
    assert [*modes, stat.S_IMODE(path.stat().st_mode)] == [mode, mode]
    assert same_bits(ps.load(path, SMALL), SMALL)


def test_it_has_the_permissions_of_any_new_file_and_follows_links(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "latest.pt").symlink_to(tmp_path / "folder" / "1.pt")
    before = os.umask(0o027)
    try:
        ps.save(tmp_path / "latest.pt", SMALL)
    finally:
        os.umask(before)
    assert (tmp_path / "latest.pt").is_symlink()
    assert stat.S_IMODE((tmp_path / "folder" / "1.pt").stat().st_mode) == 0o640
    assert os.listdir(tmp_path / "folder") == ["1.pt"]


def test_equal_trees_are_equal_files(tmp_path):
    for name in ("a.pt", "b.pt"):
        ps.save(tmp_path / name, clone(SMALL))
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


# ---- what fails leaves the old file


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (os, "fsync", OSError(errno.ENOSPC, "No space left")),
        (os, "replace", KeyboardInterrupt()),
        (torch, "save", KeyboardInterrupt()),
    ],
)
def test_a_write_that_dies_leaves_the_old_file_and_nothing_else(
    module, name, error, tmp_path, monkeypatch
):
    def failing(*args, **kwargs):
        raise error

    with stays(tmp_path / "x.pt"), monkeypatch.context() as patch:
        patch.setattr(module, name, failing)
        with pytest.raises(type(error)):
            ps.save(tmp_path / "x.pt", zeros(SMALL))


def file_size_limit(size):
    """No file of this process may grow longer: a write beyond fails as on a full disk."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))


@pytest.mark.parametrize(("elements", "share"), [(5, 0.0), (100_000, 0.5), (100_000, 0.999)])
def test_a_disk_that_is_full_at_any_byte_is_an_os_error(elements, share, tmp_path):
    path, tree = tmp_path / "x.pt", {"w": torch.ones(elements)}
    ps.save(path, tree)
    size = os.path.getsize(path)
    with stays(path):
        try:
            file_size_limit(int(share * size))
            with pytest.raises(OSError) as raised:
                ps.save(path, tree)
        finally:
            file_size_limit(None)
    assert raised.value.errno == errno.EFBIG


def test_what_is_written_is_synced_before_it_has_the_name_and_the_name_after(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        stats = os.fstat(descriptor)
        what = "directory" if stat.S_ISDIR(stats.st_mode) else f"{stats.st_size} bytes"
        events.append(f"sync {what}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths)))
    ps.save(tmp_path / "x.pt", SMALL)
    size = os.path.getsize(tmp_path / "x.pt")
    assert events == [f"sync {size} bytes", "replace", "sync directory"]


@pytest.mark.parametrize("function", ["fsync", "chmod", "open"])
def test_a_disk_that_takes_no_permissions_and_no_sync_of_directories_will_do(
    function, tmp_path, monkeypatch
):
    original = getattr(os, function)

    def refusing(what, *rest, **more):
        if function == "chmod" or os.path.isdir(what):
            raise OSError(errno.EINVAL, "not here")
        return original(what, *rest, **more)

    ps.save(tmp_path / "x.pt", zeros(SMALL))
    monkeypatch.setattr(os, function, refusing)
    ps.save(tmp_path / "x.pt", SMALL)
    assert same_bits(ps.load(tmp_path / "x.pt", SMALL), SMALL)


def of(value):
    """A state that is long enough in writing to be hit."""
    return {name: torch.full((50_000,), float(value)) for name in "abcde"}


def save_until_line(path, line):
    """Save of(2) in a process that dies at the line run with this number; return how it ended."""
    lines = itertools.count()

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.endswith("_checkpoint.py"):
            return None
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    if (child := os.fork()) == 0:
        sys.settrace(trace)
        ps.save(path, of(2))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_kill_at_any_line_of_save_leaves_the_old_or_the_new_state(tmp_path):
    path, values, code = tmp_path / "state.pt", [], -signal.SIGKILL
    for line in range(500):
        for left in tmp_path.glob(".purescale-*.tmp"):
            left.unlink()  # or each kill would make the next save longer
        ps.save(path, of(1))
        code = save_until_line(path, line)
        state = ps.load(path, like=of(0))
        values.append(int(state["a"][0]))
        assert same_bits(state, of(values[-1]))
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert code == 0
    assert values == sorted(values)
    assert set(values) == {1, 2}


def test_a_sparse_leaf_is_saved_and_loaded(tmp_path):
    tree = {"s": torch.eye(2).to_sparse()}
    ps.save(tmp_path / "file", tree)
    assert ps.load(tmp_path / "file", like=tree)["s"].to_dense().equal(torch.eye(2))
