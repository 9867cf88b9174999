"""Deciding: pairing, intervals, output check, verdict. Reads records, never a network or a clock."""
