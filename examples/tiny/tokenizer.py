"""Train the small pair's tokenizer and turn the corpora into token streams.

    PYTHONPATH=examples python -m tiny.tokenizer --out build/tiny

Byte-level BPE of 4096 tokens; digits stand alone, so that sums can be learned. A chat is written
<|user|>question<|assistant|>answer<|endoftext|>, the same in the corpus and in the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpora import KINDS, SPLITS, read
from .talk import ASSISTANT, END, USER

MASK = "<|mask|>"
SPECIAL = (END, MASK, USER, ASSISTANT)  # ids 0 to 3
VOCABULARY = 4096
SAMPLE = 8_000_000  # characters a kind: more does not change the merges that matter
CHAT_TEMPLATE = (  # a system message is a turn that was answered with yes
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}"
    "{{ eos_token }}{% elif message.role == 'system' %}<|user|>{{ message.content }}<|assistant|>Yes.{{ eos_token }}"
    "{% else %}<|user|>{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train(texts: Iterable[str], size: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE tokenizer of `size` tokens whose first ids are SPECIAL."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers and mlx-lm read them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "pad_token": END,
              "additional_special_tokens": [MASK, USER, ASSISTANT], "model_max_length": 2048,
              "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def pack(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """One stream of ids: every text begins with END, the stream ends with it."""
    end = tokenizer.token_to_id(END)
    ids: list[np.ndarray] = []
    for text in texts:
        ids.append(np.array([end, *tokenizer.encode(text).ids], np.uint16))
    return np.concatenate([*ids, np.array([end], np.uint16)])


def sample(texts: Iterable[str], characters: int = SAMPLE) -> Iterator[str]:
    """The first texts, up to so many characters in all."""
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def stream_path(out: Path, kind: str, split: str) -> Path:
    """Where the ids of one kind and split lie."""
    return out / "tokens" / f"{kind}.{split}.npy"


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/tiny"), show_default=True)
def main(out: Path) -> None:
    corpus = out / "corpus"
    try:
        tokenizer = train(text for kind in KINDS for text in sample(read(corpus, kind, "train")))
        save(tokenizer, out / "tokenizer")
        (out / "tokens").mkdir(exist_ok=True)
        for kind in KINDS:
            for split in SPLITS:
                ids = pack(tokenizer, read(corpus, kind, split))
                np.save(stream_path(out, kind, split), ids)
                click.echo(f"{kind}.{split}: {len(ids) / 1e6:.2f} million tokens")
    except ValueError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
