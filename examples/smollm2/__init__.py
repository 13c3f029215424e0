"""Data for a draft of SmolLM2-135M-Instruct: the target out of a wheel, and prompts for it to answer."""
