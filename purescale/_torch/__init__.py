"""Utilities over torch: list kernels, donation, tracing, DTensors, autocast, private names.

They work on tensors, and on lists of them.

Entry: `foreach`, arithmetic over lists of tensors, on an accelerator in few operators for any
number of small tensors; `flat_buffer.join`, many tensors as one, and back; `donation.can_write`,
which memory may be overwritten; `tracing.host_can_read`, whether the host can read a value without
waiting; `reads.NoReads`, in which a read raises; `dtensor.local_shard` and back;
`autocast.outside_autocast`.
`private.py` lists torch's private functions and classes, and looks one up when it is needed.
Hands on: tensors, lists of them and bools; `tensor_list.TensorList`, a list with what is known of
it.
May import: torch and optree, and no other room.
"""
