"""The bundled speculative decoder. Imports nothing of ours; the harness reaches it only over HTTP."""
