"""A conformance suite for clients that measure streamed tokens: a server with known token times, and its cases.

As a command, for a client in any language: `python -m kernarc.harness.selftest.conformance --port 8000`, then point the
client at `http://127.0.0.1:8000/CASE` and compare its figures with `GET /truth`. The project's own client:
`kernarc-gate selftest`.
"""
