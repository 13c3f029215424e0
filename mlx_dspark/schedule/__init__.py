"""Scheduling policies: how many drafts each round verifies. Pure Python, no mlx."""

from .cost import CostCurve
from .policies import Fixed, Plain, Policy, Threshold, make_policy, needs_costs

__all__ = ["CostCurve", "Fixed", "Plain", "Policy", "Threshold", "make_policy", "needs_costs"]
