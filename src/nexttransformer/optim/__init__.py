"""The optimizer every method shares: schedules, parameter groups, Muon for matrices, AdamW for the rest.

`schedule` and `groups` do not import torch, so that an audit can recompute them quickly.
"""
