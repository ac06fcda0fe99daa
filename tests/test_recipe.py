"""All that a forward changes in a module is as it was after the call: eager, mapped, compiled."""

import collections
import contextlib
import copy
import functools
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from helpers import called, module_of, same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import purescale as ps


class Net(nn.Module):
    """Has one of each kind of thing that a forward may change; which it changes is an argument."""

    def __init__(self):
        super().__init__()
        self.lin, self.drop = nn.Linear(3, 3), nn.Dropout(0.0)
        self.handle = self.lin.register_forward_hook(add_one)
        self.lin.register_forward_hook(halve)
        self.installed, self.count = False, 0
        self.empty, self.list, self.nested = [], [3, 1, 2], [[1], {"a": [2]}]
        self.dict, self.default = {"n": 1, "m": 2}, collections.defaultdict(list)
        self.order = collections.OrderedDict(a=1, b=2)
        self.counter = collections.Counter(a=2, b=-1)
        self.set, self.deque = {1, 2}, collections.deque([1, 2], maxlen=4)
        self.cache, self.helper = Helper(), Helper()
        self.partial = functools.partial(max, [1])

    def forward(self, x, changes=()):
        for change in changes:
            change(self, x)
        return self.lin(self.drop(x)) * self.number()

    def number(self):
        """What the state amounts to, so that a change that stayed would be seen in a result."""
        lengths = len(self.empty) + len(self.nested[0]) + len(self.set) + len(self.deque)
        counts = self.count + self.dict["n"] + next(iter(self.order.values()))
        return 1 + lengths + 10 * counts + 100 * self.cache.value


class Helper:
    def __init__(self):
        self.value, self.items, self.seen = 1, {}, []


def add_one(module, *inputs_and_out):
    return inputs_and_out[-1] + 1


def halve(module, *inputs_and_out):
    return inputs_and_out[-1] / 2


def double(module, *inputs_and_out):
    return inputs_and_out[-1] * 2


def double_grad(module, grads, _):
    return tuple(grad * 2 for grad in grads)


def once(register):
    """As transformers does where hidden states are asked for: behind a flag."""

    def install(net, x):
        if not net.installed:
            net.installed = True
            register(net, x)

    return install


HOOKS = {
    "forward": once(lambda net, x: net.lin.register_forward_hook(double)),
    "always, first": lambda net, x: net.lin.register_forward_hook(
        double, always_call=True, prepend=True
    ),
    "kwargs": once(lambda net, x: net.lin.register_forward_hook(double, with_kwargs=True)),
    "pre": lambda net, x: net.lin.register_forward_pre_hook(lambda m, xs: (xs[0] * 2,)),
    "backward": once(lambda net, x: net.lin.register_full_backward_hook(double_grad)),
    "state dict": lambda net, x: net.lin.register_state_dict_post_hook(lambda *args: None),
    "removed": lambda net, x: net.handle.remove(),
    "replaced at an equal count": lambda net, x: (
        net.handle.remove(),
        net.lin.register_forward_hook(double),
    ),
    "other order": lambda net, x: net.lin._forward_hooks.move_to_end(net.handle.id),
}


def count(net, x):
    net.count += 1


def remember(net, x):
    net.later, net.cache.later, net.cache.value = x, x, net.cache.value + 1


def change_layers(net, x):
    net.drop.p, net.drop.seen, net.lin.training = 0.5 if net.drop.p else 0.0, x, False


def forget(net, x):
    net.extra = 1
    del net.installed, net.cache.items, net.extra


def replace_list(net, x):
    net.empty = [*net.empty, 1]
    net.empty.append(x)


def count_up(net, x):
    net.dict["n"] += 1


def replace_keys(net, x):
    del net.dict["m"]
    net.dict["o"] = net.counter["c"] = net.order["c"] = x


def grow(net, x):
    net.nested[0].append(x)
    net.nested[1]["a"].append(3)
    net.cache.items["x"] = x
    net.default["a"].append(1)


def change_helper(net, x):
    net.helper.seen.append(x)
    net.helper.later = net.helper.value = x


CHANGES = {
    change.__name__: change
    for change in (
        count, remember, forget, change_layers, replace_list, count_up, replace_keys, grow,
        change_helper,
    )
} | {
    "append": lambda net, x: net.empty.append(x),
    "shrink": lambda net, x: net.list.clear(),
    "set": lambda net, x: (net.set.discard(1), net.set.update((7, 8))),
    "deque": lambda net, x: net.deque.extend((x, 4)),
}  # fmt: skip
MORE = {
    "in a partial": lambda net, x: net.partial.args[0].append(x),
    "counter": lambda net, x: net.counter.subtract("a"),
}
EAGER = HOOKS | CHANGES | MORE


def picture(thing, seen=None):
    """What can be reached from an object, and in which order: the same objects are the same ids."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, torch.Tensor):
        return id(thing)
    seen.add(id(thing))
    parts = []
    if isinstance(thing, dict):
        parts = [(key, picture(value, seen)) for key, value in thing.items()]
    elif isinstance(thing, (list, tuple, collections.deque)):
        parts = [picture(value, seen) for value in thing]
    elif isinstance(thing, set):
        parts = sorted(thing)
    elif isinstance(thing, functools.partial):
        parts = picture(thing.args, seen)
    if isinstance(thing, (nn.Module, Helper)):
        parts = [(key, picture(value, seen)) for key, value in sorted(vars(thing).items())]
    return id(thing), parts


@contextlib.contextmanager
def as_before():
    """A net, its `apply` after one call, and arguments; the net is as before at the end."""
    net, x = Net(), torch.arange(6.0).reshape(2, 3)
    apply, params, buffers = ps.make_functional(net)
    apply(params, buffers, x)
    before = picture(net)
    yield net, apply, (params, buffers, x)
    assert picture(net) == before


@given(names=st.lists(st.sampled_from(sorted(EAGER)), min_size=1, max_size=4), mapped=st.booleans())
def test_what_a_forward_changes_is_as_before_and_each_call_as_the_first(names, mapped):
    changes = [EAGER[name] for name in names]
    with as_before() as (net, apply, (params, buffers, x)):
        before = picture(net)

        def call(x):
            return apply(params, buffers, x, changes)[0]

        try:
            expected = copy.deepcopy(net)(x, changes)
        except (AttributeError, KeyError):
            return  # what one change takes away another one needs
        for _ in range(3):
            torch.testing.assert_close(torch.vmap(call)(x) if mapped else call(x), expected)
            assert picture(net) == before


def test_nothing_that_a_forward_keeps_of_its_arguments_stays_alive():
    with as_before() as (_, apply, (params, buffers, x)):
        batches = [x.clone() for _ in EAGER]
        seen = list(map(weakref.ref, batches))
        for change in EAGER.values():
            apply(params, buffers, batches.pop(), [change])
        gc.collect()
        assert [ref() for ref in seen] == [None] * len(seen)


def test_a_backward_hook_that_a_forward_installs_is_there_for_the_backward_of_that_call():
    def grad_of(call):
        batch = torch.arange(6.0).reshape(2, 3).requires_grad_()
        call(batch, [HOOKS["backward"]]).sum().backward()
        return batch.grad

    with as_before() as (net, apply, (params, buffers, _)):
        expected = grad_of(copy.deepcopy(net))
        for _ in range(3):
            grad = grad_of(lambda *args: apply(params, buffers, *args)[0])
            torch.testing.assert_close(grad, expected)


IN_ANOTHER_PROCESS = """
import pickle, sys
import torch
import purescale as ps
ps.make_functional(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2)))  # another model
apply, *arguments = pickle.load(sys.stdin.buffer)
out, buffers = apply(*arguments)
sys.stdout.buffer.write(pickle.dumps((out, buffers)))
"""


@pytest.mark.slow
def test_an_apply_works_in_another_process():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    apply, params, buffers = ps.make_functional(model)
    arguments = params, buffers, torch.randn(4, 3)
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=pickle.dumps((apply, *arguments)),
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert same_bits(pickle.loads(done.stdout), apply(*arguments))


class Resource:
    """What is given back once, as a handle to memory or a file is."""

    returned = 0

    def __del__(self):
        Resource.returned += 1


@pytest.mark.parametrize("make", [Resource, threading.Lock])
def test_calls_share_what_cannot_be_made_anew(make):
    net = module_of(lambda m, x: (m.linear(x), m.resource), linear=nn.Linear(3, 3))
    net.resource, returned = make(), Resource.returned
    apply, params, buffers = ps.make_functional(net)
    for _ in range(2):
        assert apply(params, buffers, torch.ones(1, 3))[0][1] is net.resource
    del apply
    gc.collect()
    assert Resource.returned == returned


def compiled(apply, changes, **settings):
    return torch.compile(
        lambda params, buffers, x: apply(params, buffers, x, changes)[0],
        **{"fullgraph": True, "backend": "eager"} | settings,
    )


def test_a_compiled_call_is_as_the_first_and_one_graph():
    changes = [*(CHANGES[name] for name in CHANGES if name != "forget"), forget]
    counted = CompileCounterWithBackend("eager")
    with as_before() as (net, apply, arguments):
        expected, before = copy.deepcopy(net)(arguments[-1], changes), picture(net)
        call = compiled(apply, changes, backend=counted)
        for _ in range(3):
            torch.testing.assert_close(call(*arguments), expected)
            assert picture(net) == before
    assert counted.frame_count == 1


def test_a_transform_inside_of_a_compiled_function_finds_all_as_before():
    with as_before() as (_, apply, (params, buffers, x)):
        function = torch.vmap(lambda x: apply(params, buffers, x, [count, grow, count_up])[0])
        again = torch.compile(function, fullgraph=True, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(again(x), function(x))


def test_models_that_are_alike_share_a_graph():
    counted = CompileCounterWithBackend("eager")
    call = torch.compile(
        lambda apply, *args: apply(*args, [count, grow])[0], fullgraph=True, backend=counted
    )
    for _ in range(3):
        net, x = Net(), torch.arange(6.0).reshape(2, 3)
        net.lin._forward_hooks.clear()  # torch numbers the hooks of a process
        del net.handle
        apply, params, buffers = ps.make_functional(net)
        torch.testing.assert_close(call(apply, params, buffers, x), net(x, [count, grow]))
    assert counted.frame_count == 1


def fail(net, x):
    raise ValueError("in the middle")


def test_what_a_compiled_function_catches_leaves_all_as_before():
    with as_before() as (_, apply, (params, buffers, x)):

        def function(x):
            try:
                apply(params, buffers, x, [count, grow, change_layers, fail])
            except ValueError:
                x = x + 1
            return apply(params, buffers, x)[0]

        call = torch.compile(function, fullgraph=True, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(call(x), apply(params, buffers, x + 1)[0])


def graph_break(net, x):
    torch._dynamo.graph_break()


@pytest.mark.slow
def test_what_stands_around_a_break_is_compiled_once():
    counted = CompileCounterWithBackend("eager")
    with as_before() as (_, apply, (params, buffers, x)):
        call = compiled(apply, [count, graph_break], fullgraph=False, backend=counted)
        call(params, buffers, x)
        graphs = counted.frame_count
        assert graphs > 0
        for _ in range(4):
            call({name: p.clone() for name, p in params.items()}, buffers, x)
    assert counted.frame_count == graphs


def aliases(writes):
    """A net with plain tensors over one memory, of which it may write into one."""

    def forward(m, x):
        if writes:
            m.history += 1
        return m.lin(x) + m.last + m.columns["first"].sum()

    net = module_of(forward, lin=nn.Linear(2, 2))
    net.history = history = torch.zeros(3, 2)
    net.last, net.columns = history[2], {"first": history.t()[0]}
    return net


def test_a_write_into_a_plain_tensor_that_another_would_see_is_refused():
    net, x = aliases(writes=True), torch.randn(4, 2)
    apply, params, buffers = ps.make_functional(net)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"wrote into history, which shares memory.*Fix: "):
            apply(params, buffers, x)
    assert torch.equal(net.history, torch.zeros(3, 2))


def test_plain_tensors_over_one_memory_may_be_read():
    net, x = aliases(writes=False), torch.randn(4, 2)
    apply, params, buffers = ps.make_functional(net)
    for call in (apply, torch.compile(apply, backend="eager", fullgraph=True)):
        torch.testing.assert_close(call(params, buffers, x)[0], net(x))


def test_a_forward_with_hidden_modules_may_replace_a_buffer_of_them_and_of_its_own():
    def forward(m, x):
        m.mean = m.mean + x.detach().mean(0)
        norm = m.hidden[1]
        norm.running_mean = norm.running_mean + m.mean
        return m.lin(norm(m.hidden[0](x))) + norm.running_mean

    net, x = module_of(forward, lin=nn.Linear(2, 2), mean=torch.zeros(2)), torch.randn(4, 2)
    net.hidden = [nn.Linear(2, 2), nn.BatchNorm1d(2)]  # which it does not register
    out, new = called(net, x)
    assert torch.equal(out, net(x))
    assert torch.equal(new["mean"], net.mean)


def test_a_compiled_function_tells_models_that_differ_in_their_references_only():
    def picks(which):
        layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        net = module_of(lambda m, x: m.picked[1][0](x), layers=layers)
        net.picked = layers[which], [layers[which]]
        return net

    call, x = torch.compile(lambda apply, *args: apply(*args)[0], backend="eager"), torch.ones(1, 2)
    for net in (picks(0), picks(1), picks(0)):
        torch.testing.assert_close(call(*ps.make_functional(net), x), net(x))


def test_a_result_with_names_is_made_anew_as_one():
    last, x = torch.arange(6.0).view(2, 3).max(0), torch.ones(1, 3)
    model = module_of(
        lambda m, x: m.linear(x) + m.last.values + m.last.indices, linear=nn.Linear(3, 3), last=last
    )
    assert torch.equal(called(model, x)[0], model(x))
