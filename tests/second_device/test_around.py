"""What stands around a step, on the second device: what may wait and what may not, a tensor on the
wrong device, files, live torch objects, reports, statistics, models that checkpoint themselves.
"""

import inspect

import pytest
import sim
import torch
import torch.nn.functional as F
from helpers import (
    Checkpointed,
    assert_close,
    clone,
    cross_entropy_of,
    mean_square_of,
    same_bits,
    small_net,
    tensors,
)
from jobs import ADAMW, JOBS, RULE, images, job, mlp, to, vectors
from torch import nn

import purescale as ps

SIM, FAR = "sim:0", "sim:1"


def agree(found, expected, tolerance=1e-6):
    assert_close(to("cpu", found), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def on_both(body):
    """What `body(device)` returns on the CPU and on the device, where nothing may wait."""
    expected = body("cpu")
    found = body(SIM)
    agree(found, expected)
    return found


def steps_only():
    return sim.waiting(refused=True)


# ---- a tensor on the wrong device ----------------------------------------------------------------


@pytest.mark.parametrize("field", ["params", "buffers", "opt_state", "scaler", "step"])
def test_a_step_refuses_a_part_of_the_state_on_another_device(field):
    made = job(SIM, net=small_net, data=images)
    state = made.state._replace(**{field: to(FAR, getattr(made.state, field))})
    before = to("cpu", state)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="sim:1"):
        made.step(state, made.windows[0], donate=True)
    assert same_bits(to("cpu", state), before)


def test_a_step_refuses_a_batch_on_another_device():
    made = job(SIM)
    with pytest.raises(RuntimeError, match="sim:1"):
        made.step(made.state, to(FAR, made.windows[0]))


@pytest.mark.parametrize("device", ["cpu", FAR])
def test_a_scaler_on_another_device_is_refused_with_the_cure(device):
    params = {"w": torch.ones(3, device=SIM)}
    with pytest.raises((ValueError, TypeError), match="init"):
        ps.unscale_and_check(RULE.init(device), params)
    with pytest.raises((ValueError, TypeError), match="init"):
        ps.unscale_and_step(ADAMW, RULE.init(device), params, params, ADAMW.init(params))


@pytest.mark.parametrize("device", ["cpu", FAR])
def test_a_donated_optimizer_step_with_a_gradient_elsewhere_changes_nothing(device):
    params, grads, state = weights_and_gradients()
    grads["b"] = grads["b"].to(device)
    bad = torch.tensor(False, device=SIM)
    before = to("cpu", (params, state))
    with pytest.raises((ValueError, RuntimeError)):
        ps.maybe_step(ADAMW, params, grads, state, bad, donate=True)
    assert same_bits(to("cpu", (params, state)), before)


# ---- launches ------------------------------------------------------------------------------------

CLASSES = ("AdamW", "SGD", "Adagrad", "RMSprop", "NAdam")
AROUND = {
    "masters": (ps.with_master_weights(ADAMW), torch.bfloat16),
    "rounding": (ps.with_stochastic_rounding(ADAMW), torch.bfloat16),
    "narrow": (ps.with_state_dtype(ADAMW, {"exp_avg": torch.bfloat16}), torch.float32),
    **{n: (ps.from_torch(getattr(torch.optim, n), lr=1e-2), torch.float32) for n in CLASSES},
}


@pytest.mark.parametrize("name", AROUND)
def test_launches_do_not_grow_with_the_number_of_tensors(name):
    optimizer, dtype = AROUND[name]
    launches = []
    for number in (10, 300):
        params = {str(i): torch.randn(64, device=SIM).to(dtype) for i in range(number)}
        state, scaler = optimizer.init(params), RULE.init(SIM)
        arguments = [clone((params, params, state)) for _ in range(2)]
        ps.unscale_and_step(optimizer, scaler, *arguments[0], 1.0, donate=True)
        with sim.counted() as counts, steps_only():
            ps.unscale_and_step(optimizer, scaler, *arguments[1], 1.0, donate=True)
        launches.append(counts.launches)
    assert launches[1] < 2 * launches[0]


def test_a_step_made_anew_and_the_init_of_a_state_do_not_wait():
    params, _, _ = weights_and_gradients()
    with steps_only():
        for name in CLASSES:
            optimizer = ps.from_torch(getattr(torch.optim, name), lr=1e-2)
            ps.init_train_state(params, {}, optimizer, RULE)


# ---- files, and live objects of torch ------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW, `max_norm`", "masters of bfloat16", "`SpikeGuard`"])
@pytest.mark.parametrize(("here", "there"), [(SIM, "cpu"), ("cpu", SIM), (SIM, FAR)])
def test_a_saved_state_goes_on_on_another_device(name, here, there, tmp_path):
    state, step, windows = JOBS[name](here)
    state, _ = step(state, windows[0])
    ps.save(tmp_path / "state.pt", state)
    like, go_on, elsewhere = JOBS[name](there)
    loaded = ps.load(tmp_path / "state.pt", like=like)
    assert {tensor.device for tensor in tensors(loaded)} == {torch.device(there)}
    assert same_bits(to("cpu", loaded), to("cpu", state))
    for window, other in zip(windows[1:], elsewhere[1:], strict=True):
        state, _ = step(state, window)
        loaded, _ = go_on(loaded, other)
    agree(loaded.params, to("cpu", state.params))


def test_a_dict_of_a_state_keeps_the_tensors_of_the_device():
    state = JOBS["AdamW, `max_norm`"](SIM).state
    d = ps.to_state_dict(state)
    kept = {t.data_ptr() for t in tensors(d) if t.device.type == "sim"}
    assert kept >= {t.data_ptr() for t in tensors(state.params)}
    assert same_bits(to("cpu", ps.from_state_dict(d, like=state)), to("cpu", state))


def live(device):
    torch.manual_seed(0)
    model = mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    return model, optimizer, scaler


def torchs_step(model, optimizer, scaler, batch):
    x, y = batch
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_a_running_job_is_taken_over_and_given_back_on_the_device():
    batches = to(SIM, [vectors(index) for index in range(6)])
    objects, stayed = live("sim"), live("sim")
    for batch in batches[:2]:
        torchs_step(*objects, batch)
    apply, optimizer, rule, state = ps.interop.torch_amp.take_over(*objects)
    parts = {"loss_fn": cross_entropy_of(apply), "optimizer": optimizer, "rule": rule}
    with steps_only():
        for batch in batches[2:4]:
            state, _ = ps.train_step(state, [batch], **parts)
    ps.interop.torch_amp.give_back(state, optimizer, rule, *objects)
    for batch in batches[4:]:
        torchs_step(*objects, batch)
    for batch in batches:
        torchs_step(*stayed, batch)
    found, expected = (dict(model.named_parameters()) for model, _, _ in (objects, stayed))
    agree(found, to("cpu", expected))
    assert objects[2].get_scale() == stayed[2].get_scale()


def test_a_state_is_loaded_into_a_model_on_another_device():
    state, step, windows = JOBS["float16, batch norm"](SIM)
    state, _ = step(state, windows[0])
    for device in ("cpu", FAR):
        model = small_net().to(device)
        ps.load_into(model, state.params, state.buffers)
        assert {t.device for t in model.state_dict().values()} == {torch.device(device)}
        agree(dict(model.named_parameters()), to("cpu", state.params))


# ---- what waits, as its docstring says -----------------------------------------------------------


def waits(function, *args, **kwargs):
    with sim.counted() as counts:
        function(*args, **kwargs)
    return counts.reads + counts.to_host + counts.waits > 0


def net_and_batch(device):
    apply, params, buffers = to(device, ps.make_functional(small_net()))
    return apply, params, buffers, to(device, images(0))


def probe():
    apply, params, buffers, batch = net_and_batch(SIM)
    ps.probe_scales(cross_entropy_of(apply), params, buffers, batch, exponents=(0, 8))


def precise():
    apply, params, buffers, (x, _) = net_and_batch(SIM)
    ps.precise_bn(apply, params, buffers, [x, x], num_samples=16)


def loaded():
    state = JOBS["AdamW, `max_norm`"](SIM).state
    ps.from_state_dict(ps.to_state_dict(state), like=state)


AMP = ps.interop.torch_amp
SYNCING = {
    ps.check_scaler: lambda: ps.check_scaler(RULE.init(SIM), RULE),
    ps.check_guard: lambda: ps.check_guard(ps.SpikeGuard().init(SIM), max_rejections=3),
    ps.check_grad_norm: lambda: ps.check_grad_norm(torch.ones((), device=SIM)),
    ps.probe_scales: probe,
    ps.precise_bn: precise,
    ps.from_state_dict: loaded,
    ps.GradReport: lambda: str(ps.grad_report(weights_and_gradients()[1])),
    AMP.to_state_dict: lambda: AMP.to_state_dict(AMP.rule(), AMP.rule().init(SIM)),
}


@pytest.mark.parametrize("function", SYNCING, ids=lambda function: function.__name__)
def test_what_waits_says_so_first(function):
    assert waits(SYNCING[function])
    assert "sync" in inspect.getdoc(function).split("\n\n")[0].lower()


def reports():
    apply, params, buffers, (x, y) = net_and_batch(SIM)
    opt_state = ADAMW.init(params)
    with steps_only():
        (_, _), grads = ps.value_and_grad(cross_entropy_of(apply))(params, buffers, (x, y))
        new, _ = ADAMW.step(params, grads, opt_state)
        wanted = ps.wanted_update(ADAMW, params, grads, opt_state)
        return {
            "grad_report": ps.grad_report(grads),
            "forward_report": ps.forward_report(apply, params, buffers, x),
            "update_report": ps.update_report(params, new, wanted),
            "grad_amax": ps.grad_amax(grads),
        }


def test_reports_are_made_without_a_wait_and_printed_with_one():
    made = reports()
    for name in ("grad_report", "forward_report", "update_report"):
        with steps_only(), pytest.raises(RuntimeError, match="the host waits"):
            str(made[name])
        assert waits(str, made[name])


def report_of(device):
    apply, params, buffers, (x, y) = net_and_batch(device)
    _, grads = ps.value_and_grad(cross_entropy_of(apply))(params, buffers, (x, y))
    return str(ps.grad_report(grads)), str(ps.forward_report(apply, params, buffers, x))


def test_reports_print_what_they_print_on_the_cpu():
    assert report_of(SIM) == report_of("cpu")


# ---- numbers of the host -------------------------------------------------------------------------


def weights_and_gradients():
    params = {"w": torch.ones(3, device=SIM), "b": torch.ones(2, device=SIM)}
    return params, clone(params), ADAMW.init(params)


def by_a_rate(lr):
    made = job(SIM, ps.from_torch(torch.optim.AdamW, lr=lr))
    return lambda: made.step(made.state, made.windows[0])


def in_a_step(**settings):
    made = job(SIM, microbatches=2)
    return lambda: made.step(made.state, made.windows[0], **settings)


def a_flag_of_python():
    params, grads, state = weights_and_gradients()

    def call():
        for flag in (True, False):
            ps.maybe_step(ADAMW, params, grads, state, flag)
            RULE.update(RULE.init(SIM), flag)
            ps.select(flag, params, params)

    return call


def settings_of_a_state():
    optimizer = ps.from_torch(torch.optim.AdamW, lr=1e-2, in_state=("lr", "betas"))
    state = optimizer.init(weights_and_gradients()[0])

    def call():
        ps.replace_settings(state, lr=0.1, betas=(0.8, 0.9))
        ps.replace_settings(state, lr=torch.tensor(0.1))

    return call


def a_table_of_rates():
    def make(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2)

    return by_a_rate(ps.schedule_from_torch(make, 1e-2, 10))


def a_mean_and_an_index():
    params, _, _ = weights_and_gradients()
    stacked = ps.stack_states([params] * 2)
    return lambda: [
        *(ps.ema(params, params, decay) for decay in (0.9, torch.tensor(0.9))),
        *(ps.member(stacked, index) for index in (1, torch.tensor(1))),
    ]


FROM_THE_HOST = {
    "a flag": a_flag_of_python,
    "a rate": lambda: by_a_rate(torch.tensor(1e-2)),
    "a table of rates": a_table_of_rates,
    "settings of a state": settings_of_a_state,
    "a weight": lambda: in_a_step(weight_fn=lambda batch: torch.tensor(8.0)),
    "a bound of values": lambda: in_a_step(clip_value=torch.tensor(0.1)),
    "a bound of the norm": lambda: in_a_step(max_norm=torch.tensor(0.1)),
    "a decay and an index": a_mean_and_an_index,
}


@pytest.mark.parametrize("name", FROM_THE_HOST)
def test_the_host_does_not_wait_for_a_number_that_it_sends(name):
    call = FROM_THE_HOST[name]()
    with steps_only():
        call()


# ---- batch norm ----------------------------------------------------------------------------------


def statistics(device):
    apply, params, buffers, _ = net_and_batch(device)
    stats = ps.init_bn_stats(buffers)
    batches = to(device, [images(index)[0] for index in range(3)])
    with steps_only():
        for x in batches:
            stats = ps.accumulate_bn_stats(stats, apply, params, buffers, x)
        merged = ps.merge_bn_stats(stats, stats)
        return ps.bn_buffers(stats, buffers), ps.bn_buffers(merged, buffers, estimator="within")


def test_statistics_of_batch_norms_do_not_wait():
    on_both(statistics)


@pytest.mark.parametrize("normalize", ["batch", "sequential"])
@pytest.mark.parametrize("estimator", ["pooled", "within"])
def test_precise_bn_has_the_statistics_of_the_cpu(estimator, normalize):
    def body(device):
        loader = [images(index)[0] for index in range(3)]  # of the CPU
        settings = {"num_samples": 24, "estimator": estimator, "normalize": normalize}
        call = lambda forward, x: forward(x.to(device))  # noqa: E731
        return ps.precise_bn(*net_and_batch(device)[:3], loader, **settings, call=call)

    on_both(body)


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [SIM, FAR])
@pytest.mark.parametrize("policy", ["compute=float32", "compute=float16,output=float32"])
def test_a_model_that_checkpoints_itself_has_the_gradients_of_one_that_does_not(policy, device):
    results = []
    for checkpoints in (False, True):
        apply, params, buffers = ps.make_functional(Checkpointed(checkpoints).to(device))
        loss_fn = mean_square_of(ps.with_policy(apply, f"params=float32,{policy}"))
        torch.manual_seed(1)
        x = torch.randn(33, 6, device=device)
        with steps_only():
            results.append(ps.value_and_grad(loss_fn)(params, buffers, x))
    assert same_bits(*to("cpu", results))


@pytest.mark.parametrize("device", [SIM, FAR])
def test_dropout_replays_from_the_state_and_leaves_the_generator_of_the_device_alone(device):
    net = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 3))
    made = job(device, net=lambda: net, seeded=True)
    before = torch.sim.get_rng_state(device)
    with steps_only():
        first, again = [made.step(made.state, made.windows[0]) for _ in range(2)]
        second = made.step(first[0], made.windows[0])
    assert same_bits(*to("cpu", (first, again)))
    assert not same_bits(*to("cpu", (first[1].loss, second[1].loss)))
    assert torch.equal(torch.sim.get_rng_state(device), before)


def test_no_call_holds_memory_of_the_device_when_its_results_are_gone():
    apply, params, buffers, (x, _) = net_and_batch(SIM)
    apply(params, buffers, x)
    with sim.counted() as counts:
        apply(params, buffers, x)
    assert counts.blocks == 0
