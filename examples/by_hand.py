"""The step of `train_step` written out with the small functions only: float16 compute, float32
masters, dynamic loss scale.

First one batch a step, then the same with four microbatches a step.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import purescale as ps

images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
dataset = torch.utils.data.TensorDataset(images.float().reshape(-1, 1, 8, 8) / 16, labels)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 16, 3),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(16 * 36, 10),
)

# -- the loop
apply, params, buffers = ps.make_functional(model)
apply = ps.with_policy(apply, "params=float32,compute=float16,output=float32")
optimizer = ps.from_torch(torch.optim.AdamW, lr=3e-3)
rule = ps.DynamicScale(init_scale=2.0**24)
opt_state, scaler = optimizer.init(params), rule.init()


def loss_fn(params, buffers, batch):
    x, y = batch
    logits, buffers = apply(params, buffers, x)
    return F.cross_entropy(logits, y), buffers


gradients = ps.value_and_grad(loss_fn)
for batch in torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True):
    (loss, new_buffers), grads = gradients(params, buffers, batch, scaler=scaler)
    grads, found_inf = ps.unscale_and_check(scaler, grads)
    grads, norm = ps.clip_by_global_norm(grads, max_norm=1.0)
    params, opt_state = ps.maybe_step(optimizer, params, grads, opt_state, found_inf)
    buffers = ps.select(found_inf, buffers, new_buffers)
    scaler = rule.update(scaler, found_inf)
# -- the end of the loop

print(
    f"loss {loss.item():.3f}, scale 2**{scaler.scale.log2().item():.0f}, "
    f"{opt_state.applied.item()} steps applied of {len(dataset) // 64}"
)

# -- the loop, accumulating
microbatches = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True)
accum, new_buffers = ps.init_accum(params), buffers
for index, batch in enumerate(microbatches):
    (loss, new_buffers), grads = gradients(params, new_buffers, batch, scaler=scaler)
    grads, found_inf = ps.unscale_and_check(scaler, grads)
    accum = ps.accumulate_grads(accum, grads, weight=len(batch[1]), found_inf=found_inf)
    if ps.accumulation_window(index, every=4, total=len(microbatches)).should_update:
        grads, found_inf = ps.accumulated_grads(accum)
        grads, norm = ps.clip_by_global_norm(grads, max_norm=1.0)
        params, opt_state = ps.maybe_step(optimizer, params, grads, opt_state, found_inf)
        buffers = new_buffers = ps.select(found_inf, buffers, new_buffers)
        scaler = rule.update(scaler, accum.found_inf)
        accum = ps.init_accum(params)
# -- the end of the accumulating loop

print(
    f"loss {loss.item():.3f}, {opt_state.applied.item()} steps applied after {len(microbatches)} "
    "more microbatches"
)
