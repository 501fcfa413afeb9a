"""Stores a text as a context cache, asks two questions about it, and deletes it.

.venv/bin/python docs/examples/context_cache.py http://127.0.0.1:8000 FILE [API_KEY]
"""

import json
import sys
import urllib.error
import urllib.request
from typing import Any


def call(method: str, url: str, body: Any, key: str) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method)) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        sys.exit(f"{method} {url} is answered with status {error.code}: {error.read().decode()}")


def main(server: str, file: str, key: str = "none") -> None:
    with open(file) as opened:
        text = f"Answer from this text alone.\n\n{opened.read()}"
    model = call("GET", f"{server}/v1/models", None, key)["data"][0]["id"]
    beginning = {"messages": [{"role": "system", "content": text}], "ttl": 600}
    cache = call("POST", f"{server}/v1/context_caches", beginning, key)
    print(f"{cache['id']} holds {cache['tokens']} tokens")
    for question in ("What is it about?", "Which names are in it?"):
        messages = [{"role": "user", "content": question}]
        asked = {"model": model, "context_cache": cache["id"], "messages": messages, "max_tokens": 40}
        answer = call("POST", f"{server}/v1/chat/completions", asked, key)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        print(f"{question} ({cached} tokens cached) {answer['choices'][0]['message']['content']}")
    print(call("GET", f"{server}/v1/context_caches/{cache['id']}", None, key)["saved"])
    call("DELETE", f"{server}/v1/context_caches/{cache['id']}", None, key)


if __name__ == "__main__":
    main(*sys.argv[1:])
