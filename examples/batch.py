"""Many requests at once: one engine, several streams, each with settings of its own.

    python examples/batch.py [--model MODEL --draft DRAFT]
"""

import argparse
import threading

from mlx_dspark import Sampling, load
from mlx_dspark.load import encode_prompt
from mlx_dspark.serve import Engine, Request

PROMPTS = ["def read_lines(path):", "class Stack:", ".. function:: sorted(iterable)", "import json\n\ndef main():"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    pair = load(args.model, args.draft)

    with Engine(pair) as engine:
        streams = [
            engine.submit(Request(
                prompt=tuple(encode_prompt(pair.tokenizer, prompt, raw=True)), max_tokens=args.max_tokens,
                sampling=Sampling(temperature=0.0 if number % 2 else 0.7, seed=None if number % 2 else number),
            ))
            for number, prompt in enumerate(PROMPTS)
        ]
        texts = ["" for _ in streams]

        def follow(number: int) -> None:
            for chunk in streams[number]:
                texts[number] += chunk.text

        threads = [threading.Thread(target=follow, args=(number,)) for number in range(len(streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for prompt, text in zip(PROMPTS, texts, strict=True):
            print(f"--- {prompt!r}\n{prompt}{text}\n")
        metrics = engine.metrics()
    print(f"{metrics.tokens} tokens in {metrics.rounds} rounds of one request: tau {metrics.tau:.2f}, "
          f"{metrics.rows_per_request:.2f} rows a request")


if __name__ == "__main__":
    main()
