"""The server: an engine behind OpenAI's HTTP interface, and a page to watch it (see docs/serving.md)."""
