"""Load the small pair that comes with the package, stream an answer, and look at what the draft did."""

import mlx_dspark

pair = mlx_dspark.load()  # or load("Qwen/Qwen3-4B", draft="deepseek-ai/dspark_qwen3_4b_block7")

for chunk in mlx_dspark.stream_generate(pair, "class Stack:\n    def push(self", max_tokens=80):
    print(chunk.text, end="", flush=True)
print()

# The same text in one call, and the same text without the draft: speculation changes speed only.
fast = mlx_dspark.generate(pair, "import os\n\ndef walk(", max_tokens=60)
slow = mlx_dspark.generate(pair, "import os\n\ndef walk(", max_tokens=60, policy="plain")
assert fast.ids == slow.ids
print(f"{fast.stats.rounds} target forwards instead of {slow.stats.rounds}: tau {fast.stats.tau:.2f}")

# Sampling has the target's own distribution; a seed makes it repeatable.
print(mlx_dspark.generate(pair, "The module ", max_tokens=40, temperature=0.8, top_p=0.95, seed=7))
