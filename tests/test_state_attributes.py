"""State in plain attributes: calls in turn are the module stepped in time."""

import collections
import copy
import functools
import pickle

import pytest
import torch
import torch.utils._pytree as pytree
from helpers import mean_square_of, module_of, same_bits, started
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import purescale as ps
from purescale.testing import assert_vmap_equals_loop


class Leaky(nn.Module):
    """A neuron that leaks, fires and is reset, with its membrane in an attribute (snntorch)."""

    def __init__(self):
        super().__init__()
        self.mem = None

    def forward(self, x):
        if self.mem is None:
            self.mem = torch.zeros_like(x)
        self.mem = 0.9 * self.mem + x - (self.mem > 0.3).to(x.dtype)
        return torch.sigmoid(5 * (self.mem - 0.3))


class Memories(nn.Module):
    """A neuron whose state is in a dict, which its attributes read and write (spikingjelly)."""

    def __init__(self):
        super().__init__()
        self._memories = {"v": 0.0}

    def __getattr__(self, name):
        memories = self.__dict__.get("_memories", {})
        return memories[name] if name in memories else super().__getattr__(name)

    def __setattr__(self, name, value):
        if name in self.__dict__.get("_memories", {}):
            self._memories[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, x):
        if isinstance(self.v, float):
            self.v = torch.full_like(x, self.v)
        self.v = self.v + (x - self.v) / 2
        return torch.tanh(self.v)


class Checkpointed(nn.Module):
    """A part whose backward reads the state again. In the module stepped in time it would read what
    the last step left.
    """

    checkpoints = True

    def __init__(self, inner):
        super().__init__()
        self.inner, self.mem = inner, torch.zeros(5, 3)

    def forward(self, x):
        self.mem = self.mem + x
        if not self.checkpoints:
            return self.inner(x) * self.mem
        return checkpoint(lambda x: self.inner(x) * self.mem, x, use_reentrant=False)


class Delay(nn.Module):
    """A part that keeps its last inputs in a list, and a mean in a dict, and replaces both."""

    def __init__(self):
        super().__init__()
        self.last, self.means = [torch.zeros(5, 3), torch.zeros(5, 3)], {"mean": torch.zeros(5, 3)}

    def forward(self, x):
        self.last = [*self.last[1:], x]
        self.means = {"mean": 0.9 * self.means["mean"] + 0.1 * self.last[0]}
        return x - self.means["mean"]


NETS = {
    "a membrane": (lambda: nn.Sequential(nn.Linear(3, 3), Leaky()), ("*.mem",)),
    "a dict of states": (lambda: nn.Sequential(nn.Linear(3, 3), Memories()), ("*._memories.v",)),
    "containers": (lambda: nn.Sequential(nn.Linear(3, 3), Delay()), ("*.last.*", "*.means.*")),
    "under a checkpoint": (lambda: Checkpointed(nn.Linear(3, 3)), ("mem",)),
}


@pytest.fixture(params=NETS, name="net")
def _net(request):
    torch.manual_seed(0)
    make, names = NETS[request.param]
    model = make()
    with torch.no_grad():
        model(torch.randn(5, 3))
    return model, *ps.make_functional(model, names)


def rolled(apply, params, buffers, xs):
    outs = []
    for x in xs:
        out, buffers = apply(params, buffers, x)
        outs.append(out)
    return torch.stack(outs), buffers


def state_of(model, buffers):
    """Return what a module has at the names of buffers."""
    return {name: functools.reduce(_part, name.split("."), model) for name in buffers}


def _part(obj, key):
    if isinstance(obj, dict):
        return obj[key]
    return obj[int(key)] if isinstance(obj, (list, nn.Sequential)) else getattr(obj, key)


def test_calls_in_turn_are_the_module_stepped_in_time(net):
    model, apply, params, buffers = net
    module, xs, before = copy.deepcopy(model), torch.randn(4, 5, 3), copy.deepcopy(buffers)
    expected = torch.stack([module(x) for x in xs])
    out, new = rolled(apply, params, buffers, xs)
    assert same_bits(out, expected)
    assert same_bits(new, state_of(module, new))
    assert same_bits(buffers, before)
    assert same_bits(before, state_of(model, before))


def test_gradients_go_back_in_time(net):
    model, apply, params, buffers = net
    module, xs = copy.deepcopy(model), torch.randn(4, 5, 3)
    module.checkpoints = False
    torch.stack([module(x) for x in xs]).square().sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}

    def loss_fn(params, buffers, xs):
        out, buffers = rolled(apply, params, buffers, xs)
        return out.square().sum(), buffers

    _, grads = ps.value_and_grad(loss_fn)(params, buffers, xs)
    torch.testing.assert_close(grads, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("net", "compiler"),
    [
        ("a dict of states", ps.jit),
        ("containers", torch.compile),
        ("under a checkpoint", torch.compile),
    ],
    indirect=["net"],
)
def test_compiled_calls_equal_eager_ones(net, compiler):
    _, apply, params, buffers = net
    xs = torch.randn(3, 5, 3)

    def roll(params, buffers, xs):
        return rolled(apply, params, buffers, xs)

    compiled = compiler(roll, backend="aot_eager")
    torch.testing.assert_close(
        compiled(params, buffers, xs), roll(params, buffers, xs), rtol=1e-6, atol=1e-6
    )


def test_mapped_states_equal_a_loop(net):
    _, apply, params, buffers = net
    xs = torch.randn(3, 5, 3)
    starts = ps.stack_states(
        [{n: b + i if b.is_floating_point() else b for n, b in buffers.items()} for i in (0, 1)]
    )
    assert_vmap_equals_loop(lambda b: rolled(apply, params, b, xs), starts, rtol=1e-6, atol=1e-6)


def test_a_trained_state_equals_torchs_loop_and_a_skip_leaves_it(net):
    model, apply, params, buffers = net
    sgd, rule = ps.from_torch(torch.optim.SGD, lr=0.01), ps.DynamicScale(init_scale=2.0**8)
    settings = {"loss_fn": mean_square_of(apply), "buffers": buffers, "donate": True}
    state, step = started(params, None, sgd, rule, **settings)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in torch.randn(4, 5, 3):
        before = copy.deepcopy(state.buffers)
        state, info = step(state, [torch.full_like(x, torch.inf)])
        assert info.found_inf
        assert same_bits(state.buffers, before)
        state, _ = step(state, [x])
        plain.zero_grad()
        model(x).square().mean().backward()
        plain.step()
        _detach(model)
    torch.testing.assert_close(state.params, dict(model.named_parameters()), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.buffers, state_of(model, state.buffers), rtol=1e-5, atol=1e-6)


def _detach(model):
    for module in model.modules():
        for name in {"mem", "_memories", "last", "means"} & vars(module).keys():
            kept = vars(module)[name]
            vars(module)[name] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, kept)


def test_load_into_and_pickle_keep_the_state(net):
    model, apply, params, buffers = net
    xs = torch.randn(3, 5, 3)
    _, new = rolled(apply, params, buffers, xs)
    ps.load_into(model, params, new)
    assert same_bits(new, state_of(model, new))
    if not isinstance(model, Checkpointed):
        again = pickle.loads(pickle.dumps(apply))
        assert same_bits(rolled(again, params, buffers, xs)[1], new)


def _refill(net, x):
    tensors = [*net.tensors()[1:], 3 * x]
    fresh = net.like(tensors)
    net.kept.clear()
    (net.kept.extend if isinstance(net.kept, list) else net.kept.update)(fresh)


def _grow(net, x):
    if isinstance(net.kept, list):
        net.kept.append(x)
    else:
        net.kept[f"another {len(net.kept)}"] = x


def _first(net):
    return net.keys()[0]


def _new(net, tensors):
    net.kept = net.like(tensors)


def _set(net, x):
    net.kept[_first(net)] = 2 * net.kept[_first(net)] + x


def _rename(net, x):
    if isinstance(net.kept, dict):
        net.kept["renamed"] = net.kept.pop(_first(net))


def _retype(net, _):
    net.kept = dict(enumerate(net.kept)) if type(net.kept) is list else net.tensors()


CHANGES = [
    *(_set, _refill, _grow, _rename, _retype),
    lambda net, x: net.kept[_first(net)].add_(x),
    lambda net, x: _new(net, [0.5 * t + x for t in net.tensors()]),
    lambda net, x: _new(net, [*net.tensors()[1:], x]),
    lambda net, x: net.kept.pop(net.keys()[-1]),
]


class Keeper(nn.Module):
    """A part with tensors in a list or dict, which may have a second place, and changes to it."""

    def __init__(self, kind, changes, has_alias):
        super().__init__()
        self.kept = {"list": [torch.zeros(3), torch.ones(3)], "dict": {}}[kind]
        if kind == "dict":
            self.kept |= {"a": torch.zeros(3), "b": torch.ones(3)}
        self.also = self.kept if has_alias else None
        self.changes = changes

    def keys(self):
        return list(self.kept) if isinstance(self.kept, dict) else list(range(len(self.kept)))

    def tensors(self):
        return [self.kept[key] for key in self.keys()]

    def like(self, tensors):
        if isinstance(self.kept, list):
            return tensors
        return dict(zip(self.kept, tensors, strict=True))

    def forward(self, x):
        for change in self.changes:
            change(self, x)
        read = self.kept if self.also is None else self.also
        tensors = list(read.values()) if isinstance(read, dict) else list(read)
        return x.clone() if not tensors else (torch.stack(tensors) * 1.5 + x).cumsum(0)[-1]


@given(
    kind=st.sampled_from(["list", "dict"]),
    changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3),
    has_alias=st.booleans(),
)
def test_state_in_a_container_arrives_or_is_refused(kind, changes, has_alias):
    model = nn.Sequential(Keeper(kind, changes, has_alias))
    apply, params, buffers = ps.make_functional(model, ("0.kept.*",))
    module = copy.deepcopy(model)
    keeper = module[0]
    for x in torch.arange(12.0).reshape(4, 3):
        try:
            expected = module(x)
        except (AttributeError, IndexError, KeyError, TypeError):
            return  # the module cannot run it
        has_one_value = keeper.also is (keeper.kept if has_alias else None)
        is_alike = type(keeper.kept) is type(model[0].kept) and keeper.keys() == model[0].keys()
        if not (is_alike and has_one_value):
            with pytest.raises(RuntimeError, match=r"0\.kept.*state_attributes"):
                apply(params, buffers, x)
            return
        out, buffers = apply(params, buffers, x)
        assert same_bits(out, expected)
        assert same_bits(buffers, state_of(module, buffers))


def stepped_leaky():
    model = nn.Sequential(nn.Linear(3, 3), Leaky())
    with torch.no_grad():
        model(torch.randn(5, 3))
    return model


@pytest.mark.parametrize("value", [None, torch.zeros(()), 1.0])
def test_a_state_that_changes_its_shape_or_is_reset_is_refused(value):
    model = stepped_leaky()
    model[1].register_forward_hook(lambda module, args, out: setattr(module, "mem", value))
    apply, params, buffers = ps.make_functional(model, ("*.mem",))
    with pytest.raises(
        RuntimeError, match=r"1\.mem.*expected a tensor of shape \(5, 3\).*Fix: run"
    ):
        apply(params, buffers, torch.randn(5, 3))


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("*.mem", TypeError, r"state_attributes=\('\*\.mem',\)"),
        (("*.meem",), ValueError, r"'\*\.meem', which matches nothing.* are 1\.mem, 1\.past\.0\."),
        (("1.beta",), ValueError, r"'1\.beta', which matches 1\.beta, which is float"),
        (("1.past",), ValueError, r"'1\.past', which matches nothing.*name the elements"),
        (("1.last",), ValueError, r"which matches 1\.last, which is deque;.* list of fixed length"),
    ],
)
def test_what_is_no_tensor_of_the_model_is_refused(names, error, message):
    model = stepped_leaky()
    model[1].beta, model[1].past = 0.5, [torch.ones(3)]
    model[1].last = collections.deque([torch.ones(3)])
    with pytest.raises(error, match=message):
        ps.make_functional(model, names)


def test_a_pattern_may_match_a_buffer_which_is_state_already():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    _, _, buffers = ps.make_functional(model, ("*.running_mean",))
    assert list(buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_a_view_of_a_state_is_refused_where_it_is_read():
    def forward(m, x):
        m.history += x
        return m.last + x

    model = module_of(forward)
    model.history = torch.zeros(3, 2)
    model.last = model.history[2]
    apply, params, buffers = ps.make_functional(model, ("history",))
    with pytest.raises(RuntimeError, match=r"last of the model was computed from.*Fix: "):
        apply(params, buffers, torch.ones(2))


def test_an_attribute_that_becomes_another_dtype_is_told():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(2, 2), torch.zeros(2)

        def forward(self, x):
            self.last = torch.zeros(2, dtype=torch.float64)
            return self.linear(x)

    apply, params, buffers = ps.make_functional(Counting())
    with pytest.warns(UserWarning, match="last"):
        apply(params, buffers, torch.ones(1, 2))
