"""Drafts that are recognised and not run: who they are, and what is missing here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def refusal(config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    """One sentence for a draft that this version cannot run, None for all others."""
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    architecture = architecture_of(config)
    if config.keys() & {"dspark_block_size", "dspark_target_layer_ids"} or any(t.startswith("mtp.") for t in tensors):
        return ("a draft embedded in DeepSeek-V4: its mixture-of-experts stages and hyper-connections are not "
                "implemented here, use a DeepSpec draft of another target")
    if nested.get("attention_mode") == "mla" or "kv_lora_rank" in config:
        return "a draft with latent attention (MLA, as for Kimi K3): MLA drafts are not implemented here"
    if nested.get("attention_mode") in ("kda", "mha") or "attention_modes" in nested:
        mode = nested.get("attention_mode", "mixed")
        return f"a draft with attention_mode {str(mode)[:40]!r}: only grouped-query attention is implemented here"
    if architecture == "Qwen35DSparkModel":
        return "a Qwen3.5 draft with gated queries and shifted norms: not implemented here"
    if config.get("log_snr_conditioning") or nested.get("log_snr_conditioning"):
        return "a draft with log-SNR conditioning (PrismML): not implemented here"
    if config.get("attention_sink_bias") or nested.get("attention_sink_bias") or any("sink" in t for t in tensors):
        return "a draft with attention sinks (NVIDIA): not implemented here"
    return None


def architecture_of(config: Mapping[str, Any]) -> str | None:
    """The first name under `architectures`."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
