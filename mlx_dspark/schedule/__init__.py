"""Scheduling policies: how many drafts each round verifies. Pure Python, no mlx."""

from .policies import Fixed, Plain, Policy, Threshold, make_policy

__all__ = ["Fixed", "Plain", "Policy", "Threshold", "make_policy"]
