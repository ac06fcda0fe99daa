"""What reads values on the host, never inside a step: tables of gradients, of a forward, of
updates, and a batch at many scales.
"""
