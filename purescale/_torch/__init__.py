"""What lies under everything: torch itself, and where its private names are used.

Here a leaf is already a tensor; nothing knows of trees, optimizers or loss scales.

Entry: `foreach`, arithmetic over lists of tensors in operators whose number does not grow with the
list; `donation.can_write`, whose memory may be written into; `tracing.host_can_read`, whether the
host can see a value without waiting; `dtensor.shard` and back; `autocast.outside_autocast`.
`private.py` holds every private name of torch, checked when it is imported.
Hands on: tensors, lists of them and bools; no record.
May import: torch. No other room.
"""
