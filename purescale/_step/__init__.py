"""A training step: `train_step` and its stages.

With a group whose ranks meet on a CPU, all agree first (`agree.py`). CONTRIBUTING.md has the
diagram of the stages and their files, which are the same on all devices. Kernels may depend on the
device, and where the host knows that a step is applied, numbers are Python's and nothing is
selected.

Entry: `train_step.train_step`; by hand `value_and_grad.value_and_grad`, then
`unscale_and_step.unscale_and_step` or `unscale_and_step.maybe_step`.
Below the stages: `forward_backward` and `backward`, the gradients of one microbatch;
`window_mean` and `window_result`, the mean of several; `random_state`, the generators of a window;
`spike_guard`, a guard.
Hands on: the next `train_state.TrainState` and a `step_info.StepInfo`; between the stages
`prepare.PreparedStep` with its `options.TrainStepOptions`, `window_result.MicrobatchWeights`,
`WindowResult` and `MeasuredWindow`, `memory.ArgumentMemory` and `MayWrite`, `decide.Decision`.
May import: `_loss_scale`, `_grads`, `_batch_norm`, `_optim`, `_distributed`, `_tree`, `_torch`.
"""
