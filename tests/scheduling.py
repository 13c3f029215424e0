"""Curves, taught policies and confidences for the tests of the scheduler."""

import itertools
import random

import numpy as np
import pytest

from mlx_dspark.schedule import make_policy
from mlx_dspark.schedule import simulate as sim
from mlx_dspark.schedule.cost import CostCurve
from mlx_dspark.structs import Round, Schedule

GAMMA = 7
MODELLED = ["paper", "lagged", "rate", "lookahead", "auto"]
EVERY_POLICY = ["plain", "fixed:4", "threshold:0.5", *MODELLED]
SHAPES = {
    "flat": [1, 1.02, 1.04, 1.06, 1.08, 1.1, 1.12, 1.14],
    "linear": [1 + 0.3 * n for n in range(8)],
    "row-cost-1": list(range(1, 9)),
    "stepped": [1, 1.05, 1.1, 1.15, 1.9, 1.95, 2.0, 2.05],
    "jump-then-flat": [1, 1.9, 1.92, 1.94, 1.96, 1.98, 2.0, 2.02],
    "dropping": [1, 1.4, 1.8, 2.2, 2.6, 3.0, 3.4, 2.0],
}
CURVES = {name: CostCurve(rows=dict(enumerate(map(float, costs), start=1)), draft={GAMMA: 0.2}, host=0.01)
          for name, costs in SHAPES.items()}
for _seed in range(3):
    CURVES[f"random-{_seed}"] = CostCurve(
        rows={n: 1 + 2 * random.Random(10 * _seed + n).random() for n in range(1, 9)}, draft={GAMMA: 0.1})
CONVEX = ["flat", "linear", "row-cost-1"]  # each row costs at least as much as the one before it
every_curve = pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)


def taught(text, curve, rounds=40, seed=3, kind="swinging"):
    """A policy that has seen some rounds."""
    policy = make_policy(text, GAMMA, True, curve)
    sim.replay(policy, sim.made_up(kind, rounds, seed), curve)
    return policy


def landed(index, confidences, drafts=0, accepted=0, start=0, reason=""):
    """A finished round as the loop hands it back."""
    return Round(index=index, start=start, rows=drafts + 1, proposed=len(confidences), drafts=(0,) * drafts,
                 accepted=accepted, tokens=(0,) * (accepted + 1), schedule=Schedule(drafts, "", reason), seconds={},
                 confidences=tuple(confidences))


def survivals(confidences):
    return list(itertools.accumulate(confidences, lambda a, c: a * c))


def vectors(count, seed):
    """Confidences of many kinds: even, sharp, falling."""
    rng = np.random.default_rng(seed)
    found = [v for _ in range(count // 4) for v in
             (rng.random(GAMMA), rng.beta(0.5, 0.3, GAMMA), np.sort(rng.random(GAMMA))[::-1],
              0.5 + rng.random(GAMMA) / 2)]
    return [tuple(float(c) for c in v) for v in found]


# The paper's appendix A: two tokens, A and B. The draft is undecided, the target is not. What follows an A is
# easy, what follows a B is hard, so c_2 tells x_1. One row does not pay for itself, the second would for an A.

TARGET = {"": (0.70, 0.30), "A": (0.60, 0.40), "B": (0.95, 0.05)}
DRAFT = {"": (0.50, 0.50), "A": (0.50, 0.50), "B": (0.05, 0.95)}
APPENDIX_CURVES = {
    "step": CostCurve(rows={1: 1.0, 2: 2.0, 3: 2.0}),
    "flat": CostCurve(rows={1: 1.0, 2: 1.1, 3: 1.2}),
    "linear": CostCurve(rows={1: 1.0, 2: 1.6, 3: 2.2}),
    "steep": CostCurve(rows={1: 1.0, 2: 2.0, 3: 3.0}),
}


def overlap(prefix):
    """c: the chance that the accept rule keeps a draft drawn after this prefix."""
    return sum(map(min, TARGET[prefix], DRAFT[prefix]))


def judged(prefix, token):
    """The accept rule: [chance kept, distribution of the replacement]."""
    residual = [max(0.0, p - q) for p, q in zip(TARGET[prefix], DRAFT[prefix], strict=True)]
    kept = min(1.0, TARGET[prefix]["AB".index(token)] / DRAFT[prefix]["AB".index(token)])
    return kept, [r / sum(residual) for r in residual]


def verified_law(drafts):
    """Exact law of the first two tokens when these drafts are verified."""
    law = dict.fromkeys(("AA", "AB", "BA", "BB"), 0.0)

    def commit(prefix, chance):  # what is not drafted any more comes from the target
        if len(prefix) == 2:
            law[prefix] += chance
        else:
            for token, p in zip("AB", TARGET[prefix], strict=True):
                commit(prefix + token, chance * p)

    def walk(prefix, drafts, chance):
        if not drafts or len(prefix) == 2:
            commit(prefix, chance)
            return
        kept, replacement = judged(prefix, drafts[0])
        walk(prefix + drafts[0], drafts[1:], chance * kept)
        for token, p in zip("AB", replacement, strict=True):
            commit(prefix + token, chance * (1 - kept) * p)

    walk("", drafts, 1.0)
    return law


def drafted(first, second):
    """The chance that the draft proposes these two tokens."""
    return DRAFT[""]["AB".index(first)] * DRAFT[first]["AB".index(second)]


def text_distribution(width_of):
    """Exact law of the first two tokens. width_of(c_1, c_2) decides how many drafts are verified."""
    law = dict.fromkeys(("AA", "AB", "BA", "BB"), 0.0)
    for first, second in itertools.product("AB", repeat=2):
        given = verified_law((first + second)[: width_of(overlap(""), overlap(first))])
        for text, chance in given.items():
            law[text] += drafted(first, second) * chance
    return law


# Two requests of that law

TEXTS = ["".join(text) for text in itertools.product("AB", repeat=2)]
INDEPENDENT = {(a, b): TARGET[""]["AB".index(a[0])] * TARGET[a[0]]["AB".index(a[1])]
               * TARGET[""]["AB".index(b[0])] * TARGET[b[0]]["AB".index(b[1])] for a in TEXTS for b in TEXTS}


def law_of_two(drafts_of_both):
    """Exact law of both texts. drafts_of_both([(c_1, c_2), (c_1, c_2)]) decides what is verified of each."""
    law = dict.fromkeys(INDEPENDENT, 0.0)
    for first, second in itertools.product(TEXTS, repeat=2):
        counts = drafts_of_both([(overlap(""), overlap(first[0])), (overlap(""), overlap(second[0]))])
        laws = [verified_law(tokens[:count]) for tokens, count in zip((first, second), counts, strict=True)]
        for a, b in law:
            law[a, b] += drafted(*first) * drafted(*second) * laws[0][a] * laws[1][b]
    return law
