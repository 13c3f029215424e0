"""Talk to a server with OpenAI's own client (pip install openai).

Without arguments a server with the small pair is started for the occasion; with a URL, as in
`python examples/openai_client.py http://127.0.0.1:8080`, the one there is used.
"""

import contextlib
import subprocess
import sys

from openai import OpenAI


@contextlib.contextmanager
def own_server():
    server = subprocess.Popen([sys.executable, "-m", "mlx_dspark.server", "--port", "0"], stdout=subprocess.PIPE,
                              text=True)
    try:
        yield server.stdout.readline().strip()  # the address, printed when it is ready
    finally:
        server.terminate()
        server.wait()


with contextlib.nullcontext(sys.argv[1]) if len(sys.argv) > 1 else own_server() as address:
    client = OpenAI(base_url=f"{address}/v1", api_key="none")  # the key of --api-key, if the server has one
    model = client.models.list().data[0]

    # A stream; `dspark` asks for a description of every round beside OpenAI's own fields.
    rounds = accepted = 0
    stream = client.completions.create(model=model.id, prompt="import os\n\ndef walk(", max_tokens=60, temperature=0,
                                       stream=True, extra_body={"dspark": True})
    for part in stream:
        print(part.choices[0].text, end="", flush=True)
        seen = part.dspark
        if seen.get("rows"):
            rounds, accepted = rounds + 1, accepted + seen["accepted"]
    print(f"\n-- {rounds} rounds, {accepted} drafts accepted")

    # A whole answer, and what of the prompt did not have to be computed again.
    answer = client.completions.create(model=model.id, prompt="import os\n\ndef walk(path", max_tokens=20, seed=1,
                                       temperature=0.8)
    print(answer.choices[0].text)
    details = answer.usage.prompt_tokens_details
    print(f"-- {answer.usage.prompt_tokens} prompt tokens, {details.cached_tokens} of them reused")

    if model.dspark["chat"]:  # a model with a chat template
        messages = [{"role": "user", "content": "What is speculative decoding, in one sentence?"}]
        print(client.chat.completions.create(model=model.id, messages=messages).choices[0].message.content)
