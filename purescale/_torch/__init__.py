"""What torch offers under private names, arithmetic over lists of tensors, DTensors as local shards, whose memory may be
written.
"""
