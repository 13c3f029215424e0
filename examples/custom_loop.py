"""Drive the round loop yourself: a policy of your own, and every round as a record.

A policy answers two questions. `before` sees finished rounds only; `after` sees this round's
confidences and never a draft token, which is why any policy keeps the output exact.
"""

from mlx_dspark import DecodeOptions, Sampling, decode, load
from mlx_dspark.sampling import make_rule
from mlx_dspark.structs import Schedule


class Survival:
    """Verify slots while the chance that all drafts up to there survive is at least `level`."""

    name = "survival"
    reads_confidence = uses_confidence = True

    def __init__(self, gamma: int, level: float):
        self.gamma, self.level = gamma, level

    def before(self, history):
        recent = [r.accepted for r in list(history)[-4:] if r.rows > 1]
        return 2 if recent and max(recent) == 0 else self.gamma  # a dry spell: draft less

    def after(self, proposed, confidences):
        survival, width = 1.0, 0
        for confidence in (confidences or ())[:proposed]:
            survival *= confidence
            if survival < self.level:
                break
            width += 1
        return Schedule(width, self.name, f"survival {survival:.2f}")


pair = load()
prompt = pair.tokenizer.encode("def parse(text):\n")
options = DecodeOptions(
    rule=make_rule(Sampling()), policy=Survival(pair.draft.gamma, level=0.2), max_tokens=60, stop_ids=pair.stop_ids
)
for landed in decode(pair, prompt, options):
    text = pair.tokenizer.decode(list(landed.tokens))
    print(f"{landed.index:3d}  rows {landed.rows}  accepted {landed.accepted}  {landed.schedule.reason:16s} {text!r}")
