"""Record what the draft of the small pair offers at every token of its held-out prompts' greedy answers.

    python tests/record_texts.py

It writes tests/recorded/texts.npz: confidences [prompts, tokens, gamma], calibrated, and how many drafts in a row
the target would accept there [prompts, tokens]. tests/recorded/grid.json is a cost grid that
`python -m mlx_dspark.profile --requests 4,8,16` stored (float32, OpenBLAS, 2 cores; without the share of a proposal for
half of the requests, which was not measured yet). With both, policies for several requests are replayed on real text
and real costs without the noise of a clock.
"""

from pathlib import Path

import numpy as np

from mlx_dspark import load
from mlx_dspark.decode import DecodeOptions, Run, land, prefill, propose, verify
from mlx_dspark.load import ASSETS
from mlx_dspark.samples import read_prompts
from mlx_dspark.sampling import make_rule
from mlx_dspark.schedule.calibration import calibrator
from mlx_dspark.structs import Sampling, Schedule

TOKENS = 96
WHERE = Path(__file__).parent / "recorded" / "texts.npz"


class OneByOne:
    """Propose the whole block before every token, and verify none of it."""

    name, reads_confidence, uses_confidence = "one by one", True, True

    def __init__(self, gamma):
        self.gamma = gamma

    def before(self, history):
        """The whole block."""
        return self.gamma

    def after(self, proposed, confidences):
        """None of it."""
        return Schedule(0, self.name, "recorded")


def record(pair, prompt):
    """(confidences [tokens, gamma], accepted drafts [tokens]) of one answer."""
    gamma, calibrate = pair.draft.gamma, calibrator(pair.draft.spec.temperatures)
    run = Run(pair, prompt, DecodeOptions(make_rule(Sampling()), OneByOne(gamma), max_tokens=TOKENS + 2 * gamma))
    land(run, prefill(run, prompt))
    confidences, drafts, tokens = [], [], []
    for _ in range(TOKENS + gamma):
        flight = propose(run)
        drafts.append(flight.proposal.tokens[0].tolist())
        verify(run, flight)
        landed = land(run, flight)
        confidences.append(calibrate(landed.confidences))
        tokens += landed.tokens
    runs = [next((slot for slot, token in enumerate(own) if token != tokens[at + slot]), gamma)
            for at, own in enumerate(drafts[:TOKENS])]
    return confidences[:TOKENS], runs


def main():
    """Write the file."""
    pair = load()
    prompts = read_prompts(ASSETS / "heldout.jsonl", pair)
    confidences, runs = zip(*(record(pair, prompt) for prompt in prompts), strict=True)
    WHERE.parent.mkdir(exist_ok=True)
    np.savez_compressed(WHERE, confidences=np.array(confidences, dtype=np.float16), runs=np.array(runs, dtype=np.uint8))


if __name__ == "__main__":
    main()
