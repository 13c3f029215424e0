"""Which policy steers a run of this pair: its name, this machine's costs, this draft's temperatures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CacheError
from .schedule import CostCurve, Policy, make_policy, needs_costs
from .schedule.batch import BatchPolicy, batch_needs_costs, make_batch_policy
from .schedule.calibration import calibrator
from .schedule.grid import CostGrid
from .schedule.rate import Lookahead

if TYPE_CHECKING:
    from .load import Pair

NO_PROFILE_VARIABLE = "MLX_DSPARK_NO_PROFILE"


@dataclass
class Memory:
    """What this process knows of a pair: its curve, its place for temperatures, the last run's policy by name.

    It hangs on the target and holds the draft, so that it lives and dies with them.
    """

    draft: Any
    curve: CostCurve | None = None
    calibration: Path | None = None  # where its temperatures would be: found by hashing both models, so only once
    policies: dict[str, Lookahead] = field(default_factory=dict)


def policy_for(
    pair: Pair, text: str | None, profile: bool = True, say: Callable[[str], None] = lambda text: None,
    remember: bool = False,
) -> tuple[Policy, dict[str, Any]]:
    """The policy named `text` (None: the default) and what it was built from, for the statistics.

    profile: measure the costs of this machine when none are stored; MLX_DSPARK_NO_PROFILE=1 also refrains.
    say: told once when something was measured or done without. remember: start from what earlier runs of
        this pair learned in this process; not for sampled runs, whose text would then depend on them.
    Raises ValueError for an unknown name, or for a policy whose costs may not be measured.
    """
    gamma, has_confidence = (pair.draft.gamma, pair.draft.has_confidence) if pair.draft is not None else (0, False)
    if not needs_costs(text, gamma, has_confidence):
        return make_policy(text, gamma, has_confidence), {}
    curve, origin = _curve(pair, profile and not os.environ.get(NO_PROFILE_VARIABLE), say)
    temperatures, calibration = _temperatures(pair)
    policy = make_policy(text, gamma, has_confidence, curve, calibrator(temperatures))
    if remember and isinstance(policy, Lookahead):
        policies = _memory(pair).policies
        if policy.name in policies:
            policy.inherit(policies[policy.name])
        policies[policy.name] = policy
    return policy, {"costs": origin, "calibration": calibration}


def batch_policy_for(
    pair: Pair, text: str | None, requests: int, layouts: Sequence[str], profile: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> BatchPolicy:
    """The policy that shares out rows between up to `requests` requests; arguments and errors as in `policy_for`.

    layouts: those that this target can run. A machine of which only one request was measured is priced by that.
    """
    gamma, has_confidence = (pair.draft.gamma, pair.draft.has_confidence) if pair.draft is not None else (0, False)
    if not batch_needs_costs(text, gamma, has_confidence):
        return make_batch_policy(text, gamma, has_confidence)
    grid = _grid(pair, requests, profile and not os.environ.get(NO_PROFILE_VARIABLE), say)
    if grid is not None and len(layouts) == 1:
        grid = grid.only(layouts[0])
    temperatures, _ = _temperatures(pair)
    return make_batch_policy(text, gamma, has_confidence, grid, calibrator(temperatures))


def _grid(pair: Pair, requests: int, profile: bool, say: Callable[[str], None]) -> CostGrid | None:
    from .store import find_grid

    grid = find_grid(pair)
    if grid is not None:
        return grid
    curve, _ = _curve(pair, profile, say)
    if curve is None:
        return None
    counts = {1, requests, *(2**power for power in range(1, requests.bit_length()))}
    return CostGrid.from_curve(curve, counts, pair.draft.gamma)


def _memory(pair: Pair) -> Memory:
    memories: dict[int, Memory] = pair.target.__dict__.setdefault("memories", {})
    return memories.setdefault(id(pair.draft), Memory(pair.draft))


def _curve(pair: Pair, profile: bool, say: Callable[[str], None]) -> tuple[CostCurve | None, str]:
    from .store import find_curve, save_curve

    memory = _memory(pair)
    curve = memory.curve or find_curve(pair)
    if curve is None and not profile:
        say("no costs are stored for this pair and machine: drafting a fixed width, run mlx_dspark profile once")
        return None, "none stored"
    if curve is None:
        from .profile import measure

        since = time.perf_counter()
        try:
            curve = measure(pair, short=True)
        except CacheError as error:
            say(f"{error}: drafting a fixed width")
            return None, str(error)
        where = save_curve(pair, curve)
        say(f"measured what rounds cost here in {time.perf_counter() - since:.1f} s and stored it in {where}")
    memory.curve = curve
    kind = "short measurement" if curve.about.get("short") else "measurement"
    return curve, f"{kind} of {curve.about.get('measured', 'unknown date')}"


def _temperatures(pair: Pair) -> tuple[Sequence[float] | None, str]:
    """Those fitted here, else those the checkpoint ships, else none."""
    from .store import calibration_path, read_calibration

    memory = _memory(pair)
    path = memory.calibration = memory.calibration or calibration_path(pair)
    if path.exists():
        return read_calibration(path, pair.draft.gamma), f"fitted ({path.name})"
    shipped = getattr(getattr(pair.draft, "spec", None), "temperatures", None)
    return (shipped, "shipped with the draft") if shipped else (None, "none")
