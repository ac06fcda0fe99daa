"""assert_step: a right step passes, and each planted fault is caught by the law that it breaks."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import HALF, generator_of, small_net, started
from torch import nn

import purescale as ps
from purescale.testing import assert_step, same_bits

RULE = ps.DynamicScale(init_scale=2.0**8, growth_interval=2)

# ---- a trainer, right, and wrong in one place each -----------------------------------------------


def batches(count=4, size=6):
    g, weight = generator_of(0), torch.tensor([1.0, 0.25, 1.0, 0.5, 0.75, 0.0])  # of each token
    draw = lambda: (torch.randn(size, 4, generator=g), torch.randint(3, (size,), generator=g))  # noqa: E731
    return [(*draw(), weight.clone()) for _ in range(count)]


class Trainer:
    """Right: float16's ways over float32, on a CPU."""

    schedule_by, max_norm = "applied", 0.1

    def layers(self):
        return [nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)]

    def __init__(self):
        torch.manual_seed(1)
        self.model = nn.Sequential(*self.layers())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 0.9**n)
        self.generator = torch.Generator().manual_seed(0)
        self.steps = 0

    def clear(self):
        self.optimizer.zero_grad()

    def total(self, window):
        return sum(weight.sum() for _, _, weight in window)

    def loss(self, batch, total):
        x, y, weight = batch
        return (F.cross_entropy(self.model(x), y, reduction="none") * weight).sum() / total

    def backward(self, window):
        gain = 0.5 + torch.rand((), generator=self.generator)
        total, self.count = self.total(window), len(window)
        for batch in window:
            self.scaler.scale(gain * self.loss(batch, total)).backward()

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def update(self):
        """Return True if the step was applied."""
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def after(self, applied):
        if applied:
            self.steps += 1
        if applied or self.schedule_by == "iteration":
            self.scheduler.step()

    def step(self, window):
        self.clear()
        self.backward(window)
        self.clip()
        self.after(self.update())

    def parts(self):
        names = "model", "optimizer", "scaler", "scheduler"
        return {name: getattr(self, name) for name in names}

    def state_dict(self):
        saved = {name: part.state_dict() for name, part in self.parts().items()}
        return {**saved, "steps": self.steps, "rng": self.generator.get_state()}

    def load_state_dict(self, sd):
        for name, part in self.parts().items():
            part.load_state_dict(sd[name])
        self.steps = sd["steps"]
        self.generator.set_state(sd["rng"])


class IsNotSaved(Trainer):
    """Its scale is a power of two, so that no weight of a resumed run shows that of a scaler."""

    forgets: str

    def state_dict(self):
        return {key: part for key, part in super().state_dict().items() if key != self.forgets}

    def load_state_dict(self, sd):
        super().load_state_dict({**super().state_dict(), **sd})


def trainer(name, base=Trainer, **parts):
    """A kind of trainer with other methods."""
    return type(name, (base,), parts)


def mean_of_means(self, batch, total):
    return Trainer.loss(self, batch, batch[2].sum()) / self.count


def once_a_batch(self, applied):
    Trainer.after(self, applied)
    for _ in range(self.count - 1):
        self.scheduler.step()


def clips_scaled_gradients(self):
    nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


def steps_without_a_flag(self):
    self.optimizer.step()
    self.scaler.update(2.0**8)
    return True


def of_the_first_batch(self, window):
    return window[0][2].sum()


MeanOfMeans = trainer("MeanOfMeans", loss=mean_of_means)
ScheduleByIteration = trainer("ScheduleByIteration", schedule_by="iteration")
FAULTS = {
    trainer("ScalerIsNotSaved", IsNotSaved, forgets="scaler"): ("resume", "scaler._growth_tracker"),
    trainer("CountIsNotSaved", IsNotSaved, forgets="steps"): ("resume", "steps differ"),
    trainer("GeneratorIsNotSaved", IsNotSaved, forgets="rng"): ("resume", "generators"),
    trainer("NothingIsCleared", clear=lambda self: None): ("resume", "clear `.grad`"),
    # what is clipped has one size, summed or not
    trainer("LossIsSummed", total=of_the_first_batch, max_norm=100.0): (
        *("window", "the mean over the window"),
    ),
    trainer("SchedulerStepsOnceABatch", after=once_a_batch): (
        "window",
        "one step of the scheduler",
    ),
    MeanOfMeans: ("weights", "divide the sum of the losses by the sum of the weights"),
    trainer("ClipsScaled", clip=clips_scaled_gradients): ("scale", "unscale the gradients once"),
    trainer("WithoutAFlag", update=steps_without_a_flag): (
        "skip",
        "one flag decides for everything",
    ),
    ScheduleByIteration: ("skip", "scheduler.last_epoch"),
}


def test_a_right_trainer_passes_and_has_its_own_state_afterwards():
    trainer = Trainer()
    trainer.step(batches()[:1])
    before = copy.deepcopy(trainer.state_dict())
    assert_step(trainer, None, batches())
    assert same_bits(trainer.state_dict(), before)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_of_a_trainer_is_caught_and_named(fault):
    law, words = FAULTS[fault]
    with pytest.raises(AssertionError, match=f"{fault.__name__} breaks the law `{law}`") as error:
        assert_step(fault(), None, batches())
    assert words in str(error.value)


def test_what_a_skip_may_change_is_named():
    changes = ("*scaler*", "*rng*", "*scheduler*", "*.lr")
    assert_step(ScheduleByIteration(), None, batches(), skip_changes=changes)


def test_a_quirk_is_a_law_that_is_broken_on_purpose():
    assert_step(MeanOfMeans(), None, batches(), quirks=("weights",))
    with pytest.raises(AssertionError, match=r"Trainer keeps weights, which quirks says it breaks"):
        assert_step(Trainer(), None, batches(), quirks=("weights",))


# ---- batches that are not two of half the size ---------------------------------------------------


class WithDropout(Trainer):
    def layers(self):
        *rest, last = super().layers()
        return [*rest, nn.Dropout(0.5), last, nn.Dropout(0.5)]  # drawn in turn with the first


def test_dropout_is_no_step_of_parts_which_may_be_meant():
    quirks = ("window", "weights")
    with pytest.raises(AssertionError, match=r"the law `window`[^$]*dropout.*\(\"window\", \"weig"):
        assert_step(WithDropout(), None, batches())
    assert_step(WithDropout(), None, batches(), quirks=quirks)


def recurrent_step():
    """A step over batches with a hidden state, [layers, batch, width]."""
    g = generator_of(1)
    params = {name: torch.randn(5, n, generator=g) for name, n in (("w", 4), ("u", 5))}

    def loss(params, batch):
        x, hidden = batch
        out = torch.tanh(F.linear(x, params["w"]) + F.linear(hidden, params["u"]).sum(0))
        return out.square().mean()

    sgd = ps.from_torch(torch.optim.SGD, lr=0.5)
    state, step = started(params, loss, sgd, RULE, weight_fn=lambda batch: len(batch[0]))
    draw = lambda: (torch.randn(6, 4, generator=g), torch.randn(2, 6, 5, generator=g))  # noqa: E731
    return step, state, [draw() for _ in range(4)]


def join_hidden(some):
    return torch.cat([x for x, _ in some]), torch.cat([hidden for _, hidden in some], dim=1)


def split_hidden(batch):
    x, hidden = batch
    return [(x[part], hidden[:, part]) for part in (slice(1), slice(1, None))]


def test_batches_that_do_not_join_along_their_first_dimension_break_a_law_with_the_cure():
    words = r"the law `window`[^$]*RuntimeError: .*[^$]*\[layers, batch, width\].*join=False"
    with pytest.raises(AssertionError, match=words):
        assert_step(*recurrent_step())


@pytest.mark.slow
def test_how_batches_join_may_be_told_or_that_they_do_not():
    step = recurrent_step()
    assert_step(*step, join=False)
    assert_step(*step, join=join_hidden, split=split_hidden)


def test_a_mean_of_means_is_caught_in_batches_that_do_not_join():
    step, state, data = recurrent_step()

    def of_means(state, window):
        return step(state, [window[0]])

    with pytest.raises(AssertionError, match="of_means breaks the law `weights`"):
        assert_step(of_means, state, data, join=False, split=split_hidden)


# ---- pure steps ----------------------------------------------------------------------------------


def weight_of(batch):
    return batch[2].sum()


def our_step(optimizer, *, policy=None, **settings):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    apply, params, _ = ps.make_functional(model)
    apply = apply if policy is None else ps.with_policy(apply, ps.policy(policy))

    def loss(params, batch):
        x, y, weight = batch
        logits, _ = apply(params, {}, x)
        losses = F.cross_entropy(logits.float(), y, reduction="none")
        return (losses * weight).sum() / weight.sum()

    settings = {"max_norm": 0.1, "weight_fn": weight_of} | settings
    state, step = started(params, loss, optimizer, RULE, **settings)
    return step, state


SGD = ps.from_torch(torch.optim.SGD, lr=0.5)


@pytest.mark.parametrize("half", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_our_own_step_passes(half):
    adamw = ps.from_torch(torch.optim.AdamW, lr=0.05)
    step = our_step(SGD, policy=HALF) if half else our_step(adamw)
    assert_step(*step, batches(), rtol=0.2 if half else 0.05)


def step_of_integers(rule):
    torch.manual_seed(0)
    params = {"w": torch.randn(5, 3)}
    given = params, lambda p, tokens: F.embedding(tokens, p["w"]).pow(2).mean(), SGD
    state, step = started(*given, rule, weight_fn=len)
    return step, state, [torch.arange(6) % 5 for _ in range(4)]


@pytest.mark.slow
def test_integers_overflow_by_the_scale():
    assert_step(*step_of_integers(RULE))


def test_integers_without_a_scale_need_an_overflow():
    with pytest.raises(ValueError, match=r"nothing makes a step overflow.*overflow="):
        assert_step(*step_of_integers(ps.NoScale()), scale="-")


def broken_by(change):
    """A step that returns `change(state, new, info)` in place of its new state."""

    def wrap(step):
        def broken(state, window):
            new, info = step(state, window)
            return change(state, new, info), info

        return broken

    return wrap


def writes_into_its_state(state, new, info):
    state.params["0.weight"].add_(1.0)
    return new


def averages_in_a_skip(state, new, info):
    mean = ps.ema(state.buffers["mean"], new.params["2.bias"], 0.5)
    return new._replace(buffers={**new.buffers, "mean": mean})


def keeps_a_count(step):
    calls = itertools.count(1)
    return broken_by(lambda state, new, info: new._replace(step=new.step + next(calls)))(step)


def differs_when_donated(step):
    def broken(state, window, donate=False):
        new, info = step(state, window, donate=donate)
        return new._replace(step=new.step + int(donate)), info

    return broken


PURE_FAULTS = {
    broken_by(writes_into_its_state): ("repeat", "an argument was written into"),
    broken_by(lambda state, new, info: new._replace(scaler=state.scaler)): (
        "repeat",
        "shares memory with an argument",
    ),
    keeps_a_count: ("repeat", "step differ"),
    broken_by(averages_in_a_skip): ("skip", "buffers.mean differ"),
    differs_when_donated: ("donate", "step differ"),
    broken_by(lambda state, new, info: state if info.found_inf.item() else new): (
        "compile",
        "torch.where in place of",
    ),
}


@pytest.mark.parametrize("fault", PURE_FAULTS, ids=[words for _, words in PURE_FAULTS.values()])
def test_each_planted_fault_of_a_pure_step_is_caught_and_named(fault):
    law, words = PURE_FAULTS[fault]
    step, state = our_step(SGD)
    state = state._replace(buffers={"mean": torch.ones(3)})
    with pytest.raises(AssertionError, match=f"broken breaks the law `{law}`") as error:
        assert_step(fault(step), state, batches())
    assert words in str(error.value)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((len, (), iter([1, 2])), ValueError, "batches has 2 of at least 4"),
        ((Trainer, None, [1] * 4), TypeError, "step is the class Trainer, and state is None"),
        ((small_net(), None, [1] * 4), TypeError, r"expected a trainer, .*step\(window\)"),
        ((3, (), [1] * 4), TypeError, r"step is int; expected a function"),
        ((lambda state, window: state, (), [1] * 4), AssertionError, r"expected \(state, info\)"),
    ],
)
def test_what_is_no_step_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        assert_step(*arguments)
