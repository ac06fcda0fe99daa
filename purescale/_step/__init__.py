"""One training step: `train_step` and the stages that it is made of.

Entry: `train_step.train_step`. Hands on: the next `TrainState` and a `StepInfo`.
"""
