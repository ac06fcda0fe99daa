"""A function of tensors as a graph: no writes, results apart, and what is refused by its cause."""

import tarfile

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import clone, same_bits
from torch import nn

from purescale._jit.pure_graph import trace

X = torch.arange(6.0).reshape(2, 3)


def run(graph, *inputs):
    return graph.module(*inputs, *graph.closed_over)


def addresses(tensors):
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


# ---- the graph -----------------------------------------------------------------------------------


def write_inside(x, row, number, flags):
    y, mask = x.clone(), row.clone()
    y[0] = 7.0
    y.mul_(2)
    mask.mul_(x[0])
    return [y, mask]


class Product(torch.autograd.Function):
    """A product with a derivative of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x * weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 3 * grad * weight, grad * x


GRAPHS = {  # functions of X and of tensors from outside
    "writes into what it makes": write_inside,
    "a row from outside": lambda x, row, *_: [x * row + row, x / row.sum()],
    "a number from outside": lambda x, row, number, flags: (
        [torch.lerp(x, -x, number), x**number, torch.linspace(0, number, 3)]
    ),
    "no write, though its name begins so": lambda x, row, number, flags: (
        [~flags, ~flags | (x[0] > 1)]
    ),
    "torch.func, a backward of its own": lambda x, row, *_: (
        [torch.func.grad(lambda x: Product.apply(x, row).sum())(x)]
    ),
    "torch.autograd, a backward of its own": lambda x, row, *_: list(
        torch.autograd.grad(Product.apply(y := x.detach().requires_grad_(), row).sum(), y)
    ),
    "a derivative by what is outside": lambda x, row, *_: list(
        torch.autograd.grad((x * row).square().sum(), row)
    ),
    "draws weights": lambda x, *_: [nn.Linear(3, 2)(x)],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_computes_the_function_for_all_values_of_what_is_outside(name):
    row, number = nn.Parameter(torch.tensor([1.0, 2.0, 3.0])), torch.tensor(0.5)
    outside = row, number, torch.tensor([True, False, True])
    graph = trace(lambda x: GRAPHS[name](x, *outside), [X])
    for factor in (1.0, 6.0):
        with torch.no_grad():
            row.mul_(factor)
            number.mul_(factor)
        before = clone(outside)
        torch.manual_seed(0)
        results = run(graph, X)
        torch.manual_seed(0)
        assert same_bits(list(results), GRAPHS[name](X, *outside))
        assert same_bits(outside, before)


def test_a_module_that_is_made_inside_draws_other_weights_in_each_run():
    graph = trace(GRAPHS["draws weights"], [X])
    assert not torch.equal(run(graph, X)[0], run(graph, X)[0])


def test_no_result_shares_memory_with_an_input_or_another_result():
    outside = torch.ones(3)
    graph = trace(lambda x: [x, x.T, x[0], outside, outside, (y := x + 1), y.view(6)], [X])
    results = run(graph, X)
    assert len({*addresses(results), *addresses([X, outside])}) == 9
    for result, expected in zip(results, [X, X.T, X[0], outside, outside, X + 1], strict=False):
        assert torch.equal(result, expected)


def test_a_literal_is_a_constant_of_the_graph():
    graph = trace(lambda x: [x * torch.tensor([1.0, 2.0, 3.0])], [X])
    assert graph.closed_over == []
    assert torch.equal(run(graph, X)[0], X * torch.tensor([1.0, 2.0, 3.0]))


# ---- what is refused -----------------------------------------------------------------------------

OUTSIDE = torch.ones(3)
PENDING = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
HALF, TWO = torch.tensor(0.5), torch.tensor(2)
MODULE = nn.BatchNorm1d(3)


def set_item(x):
    x[0] = 1.0
    return [x]


def set_data(x):
    x.data = x * 2
    return [x]


REFUSED = {
    "reads the value": [
        lambda x: [x * x.sum().item()],
        lambda x: [x if x.sum() > 0 else -x],
        lambda x: [x * float(x[0, 0])],
        lambda x: [x * int(x[0, 0])],
        lambda x: [x[x > 0]],
        lambda x: [x * torch.equal(x, x)],
        lambda x: [torch.unique(x)],
        lambda x: [torch.from_numpy(x.numpy())],
        lambda x: torch.func.grad(lambda y: y.sum() * y.sum().tolist())(x),
        lambda x: [torch.allclose(x, x)],
        # numbers of each kind that torch reads in C, of tensors from outside
        lambda x: [torch.add(x, x, alpha=HALF)],
        lambda x: [torch.full_like(x, HALF)],
        lambda x: [F.pad(x, (1, 1), value=HALF)],
        lambda x: [F.dropout(x, HALF)],
        lambda x: [torch.nan_to_num(x, nan=HALF)],
        lambda x: list(torch._foreach_add([x], [x], alpha=HALF)),
        lambda x: [x[:TWO]],
        lambda x: [x[TWO - 1]],
        lambda x: [x.narrow(0, 0, TWO)],
        lambda x: [x.sum(TWO - 1)],
        lambda x: list(x.split(TWO)),
        lambda x: [torch.zeros(TWO, 3)],
        lambda x: [torch.vmap(lambda row: torch.add(row, row, alpha=HALF))(x)],
        lambda x: [torch.func.grad(lambda y: torch.add(y, y, alpha=HALF).sum())(x)],
        lambda x: [x if HALF > 0 else -x],
    ],
    "makes a tensor of a list with tensors": [
        lambda x: [torch.tensor([x[0, 0], 1.0])],
        lambda x: [torch.tensor([HALF]) * x],
    ],
    "makes a torch.distributions.Distribution that checks its arguments": [
        lambda x: [torch.distributions.Normal(x, x.exp(), validate_args=True).rsample()],
    ],
    "calls requires_grad_ where torch.func differentiates or maps": [
        lambda x: [torch.vmap(lambda row: row.clone().requires_grad_())(x)],
    ],
    "closes over a tensor whose conjugation or negation is pending": [
        lambda x: [x * PENDING],
    ],
    "writes into an argument": [
        lambda x: [x.add_(1)],
        lambda x: [x[:1].mul_(2)],
        lambda x: [torch.add(x, 1, out=x)],
        lambda x: [torch.relu_(x.detach())],
        lambda x: [torch.vmap(lambda row: row.mul_(2))(x)],
        lambda x: [F.dropout(x, 0.5, inplace=True)],
        lambda x: [F.batch_norm(x, x[0], x[1], training=True)],
        set_item,
        set_data,
    ],
    "writes into a tensor that it closes over": [
        lambda x: [OUTSIDE.add_(1)],
        lambda x: [OUTSIDE.add_(x[0])],
        lambda x: [x * OUTSIDE[0].zero_()],
        lambda x: [MODULE(x)],
    ],
    "calls a function that torch.compile returned": [lambda x: [torch.compile(torch.sin)(x)]],
    "draws from a torch.Generator": [
        lambda x: [x + torch.rand(3, generator=torch.Generator().manual_seed(0))]
    ],
    "calls backward": [lambda x: [(MODULE.weight * x).sum().backward()]],
}


@pytest.mark.parametrize(
    ("cause", "function"),
    [(cause, function) for cause, functions in REFUSED.items() for function in functions],
)
def test_what_is_no_graph_for_all_values_is_refused_by_its_cause(cause, function):
    x, outside, state = X.clone(), OUTSIDE.clone(), MODULE.running_mean.clone()
    with pytest.raises(ValueError, match=rf"^the function {cause}.*Fix: "):
        trace(function, [x])
    assert torch.equal(x, X)
    assert torch.equal(OUTSIDE, outside)
    assert torch.equal(MODULE.running_mean, state)
    assert not MODULE.num_batches_tracked


def test_a_refusal_names_the_line_of_the_caller():
    line = set_item.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"test_pure_graph.py, line {line}: `x\[0\] = 1.0`"):
        trace(set_item, [X])


def gathered(x):
    rows = torch.empty_like(x)
    dist.all_gather([rows], x)
    return [rows * x]


@pytest.mark.parametrize(
    "function",
    [
        gathered,
        lambda x: [torch.func.grad(lambda y: gathered(y)[0].sum())(x)],
        lambda x: list(torch.autograd.grad(gathered(y := x.clone().requires_grad_())[0].sum(), y)),
    ],
)
def test_what_ranks_do_together_is_refused_with_the_cure(function):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"^the function calls torch.distributed.*without jit"):
            trace(function, [X])
    finally:
        dist.destroy_process_group()


def test_a_group_that_is_missing_is_told_in_the_words_of_torch():
    with pytest.raises(ValueError, match="init_process_group"):
        trace(gathered, [X])


def test_an_error_of_the_function_itself_is_raised_as_it_is():
    with pytest.raises(RuntimeError, match=r"reduction dim|shapes cannot"):
        trace(lambda x: [x @ x], [X])
    with pytest.raises(KeyError, match=r"missing"):
        trace(lambda x: [{}["missing"]], [X])
    # An error of the package has this name too.
    with pytest.raises(tarfile.ReadError, match=r"not a gzip file"):
        trace(lambda x: [tarfile.TarFile.gzopen(__file__)], [X])
