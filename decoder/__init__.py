"""The bundled speculative decoder. Imports nothing of ours; the harness reaches it only over HTTP."""

import os

# Before torch is imported: its OpenMP threads wait for each other some hundred times a step. Left alone they spin for
# about a millisecond before they sleep, so on a busy machine a step of 4 ms takes a second; 20,000 spins cost nothing
# on an idle one.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
